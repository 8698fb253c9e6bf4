#!/usr/bin/env bash
# Which split of the GPUs makes the fastest steps. Arguments go to `python -m gkd.tools.split` (see --help).
#   bash launch/split.sh --gpus 8 --run runs/mine
#   bash launch/split.sh --gpus 8 --calibrate mine.yaml
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh" >&2 # stdout has the ranking alone
exec "${GKD_VENV:-$root/.venv}/bin/python" -m gkd.tools.split "$@"
