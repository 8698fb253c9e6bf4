#!/usr/bin/env bash
# Set-up, then the checks and the tests that CI runs. Arguments go to pytest:
#   bash launch/test.sh                      everything but `slow`, `bench` and `gpu`
#   bash launch/test.sh tests/unit -k loss   some of it
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash launch/setup.sh
bin="${GKD_VENV:-$root/.venv}/bin"
export OMP_NUM_THREADS=1
pytest() { "$bin/python" -m pytest -m "not slow and not bench and not gpu" "$@"; }
if [ $# -gt 0 ]; then
    pytest "$@"
    exit
fi
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
# Unit tests are processes of their own and can share the cores; all others start many, and want them to themselves.
failed=0
pytest tests/unit -n auto --maxprocesses 4 --dist loadfile || failed=1
pytest tests --ignore=tests/unit || failed=1
exit $failed
