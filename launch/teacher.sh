#!/usr/bin/env bash
# Run the teacher server's commands on this machine. Arguments go to `python -m teacher_server` (see --help).
#   bash launch/teacher.sh --model path/to/teacher --port 15555
#   bash launch/teacher.sh worker --broker 10.0.0.5:15556 --model path/to/teacher --keys bundles/host7
#   bash launch/teacher.sh status | drain --wait | keygen keys --client trainer
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh" >&2 # stdout has only the command's output
exec "${GKD_VENV:-$root/.venv}/bin/python" -m teacher_server "$@"
