#!/usr/bin/env bash
# Set-up, then the checks and the tests that CI runs. Arguments go to pytest:
#   bash launch/test.sh                      everything but `slow`, `bench` and `gpu`
#   bash launch/test.sh tests/unit -k loss   some of it
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash launch/setup.sh
bin="${GKD_VENV:-$root/.venv}/bin"
if [ $# -eq 0 ]; then
    "$bin/ruff" check .
    "$bin/ruff" format --check .
    "$bin/mypy"
fi
export OMP_NUM_THREADS=1
exec "$bin/python" -m pytest -m "not slow and not bench and not gpu" "$@"
