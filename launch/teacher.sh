#!/usr/bin/env bash
# Start the teacher server on this machine; arguments go to `python -m teacher_server` (see --help).
#   bash launch/teacher.sh --model path/to/teacher --port 15555
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh"
exec "${GKD_VENV:-$root/.venv}/bin/python" -m teacher_server "$@"
