#!/usr/bin/env bash
# Distill a model that reads images on this machine: install, make two small models, start the teacher server, train.
# Ctrl-C leaves no process. A second run reuses the models and the prompts.
#   bash examples/vision/run.sh [key=value ...] [--help]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
bash launch/setup.sh
exec "${GKD_VENV:-$root/.venv}/bin/python" -m examples.vision "$@"
