#!/usr/bin/env bash
# Prove what only a card can prove on one that is lent for a quarter of an hour: what matters most comes first.
#   bash tests/gpu/twelve_minutes.sh [--list] [--only STAGE,..]     arguments go to python -m tests.gpu_proof
# Nothing is downloaded. Python is that of $GKD_VENV, or of .venv or .venv-gpu if it has the CUDA build, else python3
# with the packages from ${GKD_PARTS:-parts}/part_*, which tests/gpu/carry.py makes. They are joined and
# installed in ${GKD_CARRY_STORE:-runs/carry}, so parts may come with several calls. A stage whose packages are
# missing is skipped.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # an environment may have the package of another checkout
if [ "${1:-}" = --help ]; then
    sed -n '2,/^set /{/^set /d;s/^# \?//p}' "$0"
    exit
fi
store="${GKD_CARRY_STORE:-runs/carry}"
mkdir -p "$store"
python=python3
for venv in .venv-gpu .venv; do
    build="$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>&1 || true)"
    [[ ! "$build" =~ ^[0-9.]+(\+cu[0-9]+)?$ ]] || python="$venv/bin/python"
done
[ -z "${GKD_VENV:-}" ] || python="$GKD_VENV/bin/python"
if [ "$python" = python3 ]; then
    shopt -s nullglob
    python3 tests/gpu/carry.py install --store "$store" "${GKD_PARTS:-parts}"/part_* || [ $? = 3 ] # 3: no parts yet
    [ ! -f "$store/env.sh" ] || . "$store/env.sh"
elif [ -n "${GKD_TRL:-}" ]; then
    export PYTHONPATH="$PYTHONPATH:$GKD_TRL" # a folder with TRL, see tests/bench/bench_trl.py
fi
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>&1 || echo "no GPU is visible"
df -h --output=avail "$store" | sed -n "2s|^ *\(.*\)|\1 free in $store|p"
free -h | sed -n 's/^Mem: *\(\S*\).*/\1 memory/p'
"$python" - <<'END'
import sys
from importlib.metadata import distributions
from importlib.util import find_spec

print(f"Python {sys.version.split()[0]}: {sys.executable}")
found = {one.metadata["Name"]: one.version for one in reversed(list(distributions()))}  # the first on the path counts
sets = {"torch": "train", "megatron-core": "train", "vllm": "all", "ray": "all", "trl": "trl", "gguf": "models"}
print("\n".join(f"    {package:14}{found.get(package, 'missing')}" for package in sets))
if lack := sorted({name for package, name in sets.items() if package not in found}):
    print("where there is a package index: python -m tests.gpu.carry make --out parts --only", ",".join(lack))
if unmet := [name for name in ("msgspec", "omegaconf", "psutil", "zmq") if find_spec(name) is None]:
    sys.exit(f"the program that runs the stages imports {', '.join(unmet)}: bring the parts of the set train")
END
exec "$python" -m tests.gpu_proof --plan twelve_minutes "$@"
