#!/usr/bin/env bash
# Run a self-test, a command or tests on stand-in cards: bash tests/dry_card/run.sh --help
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
venv="${GKD_GPU_VENV:-$root/.venv-gpu}"

# The second line of this file is written at the end of an installation.
if [ -z "$(sed -n 2p "$venv/gkd-installed" 2>/dev/null)" ]; then
    # pip prefers torch+cpu if a local folder of wheels has it. "===" admits only the version without a local part.
    pin="$(sed -n 's/^gpu = \["torch==\([0-9.]*\)".*/\1/p' "$root/pyproject.toml")"
    constraint="$(mktemp)"
    echo "torch===$pin" >"$constraint"
    PIP_CONSTRAINT="$constraint" GKD_VENV="$venv" bash "$root/launch/setup.sh" --extra gpu
    rm -f "$constraint"
fi
if ! grep -qs "^cuda.*= '" "$venv"/lib/python3.*/site-packages/torch/version.py; then
    echo "run.sh: torch in $venv is not a CUDA build. Fix: delete $venv, and give pip an index with the CUDA build" >&2
    exit 2
fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$venv/bin/python" -m tests.dry_card.environment "$@"
