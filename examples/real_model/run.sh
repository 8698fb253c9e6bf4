#!/usr/bin/env bash
# Distill a real language model on this machine: install, fetch SmolLM2-135M-Instruct, start the teacher server, train,
# and print responses from before and after. Ctrl-C leaves no process. A second run reuses the model and the prompts.
#   bash examples/real_model/run.sh [--task rule|shrink] [--help]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
bash launch/setup.sh
exec "${GKD_VENV:-$root/.venv}/bin/python" -m examples.real_model "$@"
