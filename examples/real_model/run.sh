#!/usr/bin/env bash
# Distill a real language model on this machine: install, fetch SmolLM2-135M-Instruct (with --task examples Gemma 3 270M,
# under the terms of ai.google.dev/gemma/terms), start the teacher server, train, and print responses from before and
# after. Ctrl-C leaves no process. A second run reuses the model and the prompts.
#   bash examples/real_model/run.sh [--task rule|shrink|examples] [--teacher smollm2] [--help]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
python="${GKD_VENV:-$root/.venv}/bin/python"
case " $* " in # the help installs nothing
*" --help "* | *" -h "*) [ -x "$python" ] || { sed -n '1d; /^#/!q; s/^# *//p' "$0"; exit 0; } ;;
*) bash launch/setup.sh ;;
esac
exec "$python" -m examples.real_model "$@"
