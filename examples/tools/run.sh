#!/usr/bin/env bash
# Distill the use of a tool on this machine: install, make two small models, start the teacher server, train, and check
# that the student's answers follow the tool. Ctrl-C leaves no process. A second run reuses models and prompts.
#   bash examples/tools/run.sh [key=value ...] [--help]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
bash launch/setup.sh
exec "${GKD_VENV:-$root/.venv}/bin/python" -m examples.tools "$@"
