#!/usr/bin/env bash
# Report which rank is, or would be, on which GPU. Arguments go to `python -m gkd.tools.check_gpus` (see --help).
#   bash launch/check_gpus.sh --config mine.yaml
#   bash launch/check_gpus.sh --running runs/mine
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh" >&2 # stdout has only the table
exec "${GKD_VENV:-$root/.venv}/bin/python" -m gkd.tools.check_gpus "$@"
