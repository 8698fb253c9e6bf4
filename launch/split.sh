#!/usr/bin/env bash
# Find the split of the GPUs with the fastest steps. Arguments go to `python -m gkd.tools.split` (see --help).
#   bash launch/split.sh --gpus 8 --run runs/mine
#   bash launch/split.sh --gpus 8 --calibrate mine.yaml
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh" >&2 # stdout has only the ranking
exec "${GKD_VENV:-$root/.venv}/bin/python" -m gkd.tools.split "$@"
