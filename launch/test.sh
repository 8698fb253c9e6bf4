#!/usr/bin/env bash
# Set up, then run the checks and the tests of CI. Arguments go to pytest:
#   bash launch/test.sh                      everything except `slow`, `bench` and `gpu`
#   bash launch/test.sh tests/unit -k loss   some of it
#   bash launch/test.sh --slow [PATH ...]    all tests marked `slow`, file by file, with a time limit and a table;
#                                            its options: --slow --help
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
if [ "${1:-}" = --help ]; then
    sed -n '2,/^set /{s/^# \?//p}' "$0"
    exit
fi
# The tests marked `browser` need a Chromium: it is installed beside the set-up where that is possible.
chromium_log="$(mktemp)"
trap 'rm -f "$chromium_log"' EXIT
chromium_pid=""
if [ -z "${GKD_CHROMIUM:-}" ] && ! command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        timeout 300 bash -c 'apt-get -q update && apt-get -q install -y --no-install-recommends chromium' \
            >"$chromium_log" 2>&1 </dev/null &
        chromium_pid=$!
    else
        echo "[test] no Chromium: tests marked browser are skipped; install Debian's package chromium to run them"
    fi
fi
bash launch/setup.sh
if [ -n "$chromium_pid" ] && ! wait "$chromium_pid"; then
    echo "[test] Chromium could not be installed, tests marked browser are skipped:"
    tail -n 3 "$chromium_log"
fi
bin="${GKD_VENV:-$root/.venv}/bin"
# The tests start hundreds of processes. With PYTHONDONTWRITEBYTECODE set, each of them would compile the project again.
"$bin/python" -m compileall -q -j 0 gkd teacher_server examples tests
workers="$(env -u OMP_NUM_THREADS nproc)" # nproc would take that variable for the number of cores
export OMP_NUM_THREADS=1
if [ "${1:-}" = --slow ]; then
    rm -f "$chromium_log"
    exec "$bin/python" -m tests.by_file -m "slow and not bench and not gpu" --json docs/results/slow_tests.json "${@:2}"
fi
pytest() { "$bin/python" -m pytest -m "not slow and not bench and not gpu" "$@"; }
if [ $# -gt 0 ]; then
    pytest "$@"
    exit
fi

checks() {
    local bad=0
    "$bin/ruff" check . || bad=1
    "$bin/ruff" format --check . || bad=1
    "$bin/mypy" || bad=1
    "$bin/python" -m tests.structure --bounds || bad=1
    return $bad
}
# The checks run concurrently with the tests; their output is kept together.
report="$(mktemp)"
trap 'rm -f "$report" "$chromium_log"' EXIT
checks >"$report" 2>&1 &
checks_pid=$!

failed=0
# One worker more than cores, because the tests of whole runs mostly wait. tests/conftest.py assigns tests to workers.
pytest -n "$((workers < 4 ? workers + 1 : 4))" || failed=1
wait "$checks_pid" || failed=1
cat "$report"
exit $failed
