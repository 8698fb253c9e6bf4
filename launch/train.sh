#!/usr/bin/env bash
# Train; the teacher server must be running. Arguments go to `python -m gkd.main_gkd` (see --help).
#   bash launch/train.sh --config configs/gsm8k_qwen2.5_1.5b.yaml teacher.server_ip=10.0.0.5
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh"
export GKD_COMMAND="${GKD_COMMAND:-bash $(printf %q "$0")}" # the command that a run prints to resume it
exec "${GKD_VENV:-$root/.venv}/bin/python" -m gkd.main_gkd "$@"
