#!/usr/bin/env bash
# Make the virtual environment (.venv, or $GKD_VENV) and install the pinned dependencies into it. Safe to repeat.
#   bash launch/setup.sh [--extra cpu|gpu]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${GKD_VENV:-$root/.venv}"

# Checks pip, not python: an interrupted `python -m venv` leaves a python without pip.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -e "$venv/made-by-gkd" ]; then
        echo "setup: $venv was not made by this script and has no pip; run its python -m ensurepip, or set GKD_VENV" >&2
        exit 2
    fi
    for candidate in python3.11 python3.12 python3; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'; then
            python="$candidate"
            break
        fi
    done
    [ -n "${python:-}" ] || { echo "setup: needs Python 3.11 or 3.12 on PATH" >&2; exit 2; }
    echo "[setup] making the virtual environment $venv with $("$python" --version)"
    rm -rf "$venv" && mkdir -p "$venv" && touch "$venv/made-by-gkd"
    "$python" -m venv "$venv"
fi
"$venv/bin/python" "$root/launch/install.py" "$@"
