#!/usr/bin/env bash
# Quickstart on any machine with Python 3.11 or 3.12: install, make two small models, start the teacher server, distill,
# evaluate, print a table. With a GPU it uses that, with several two of them; it prints which. Ctrl-C leaves no process.
#   bash launch/quickstart.sh [--help]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
GKD_QUICKSTART_BEGAN="${GKD_QUICKSTART_BEGAN:-$(date +%s)}"
export GKD_QUICKSTART_BEGAN # so that wall_s includes the installation
python="${GKD_VENV:-$root/.venv}/bin/python"
case " $* " in # the help installs nothing
*" --help "* | *" -h "*) [ -x "$python" ] || { sed -n '1d; /^#/!q; s/^# *//p' "$0"; exit 0; } ;;
*) bash launch/setup.sh ;;
esac
exec "$python" -m examples.quickstart "$@"
