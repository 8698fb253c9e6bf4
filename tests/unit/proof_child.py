"""Stand in for a stage of gpu_proof: `python -m tests.unit.proof_child MODE [FILE]`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.device import VARIABLE

SLEEP = "import time; time.sleep(300)"


def main(mode: str, file: str = "") -> int:
    if mode in ("met", "missed", "met, then exit 3"):
        figure = {"name": "speed", "value": 0.5, "unit": "GB/s", "goal": ">= 0.4", "met": mode != "missed", "note": ""}
        Path(file).write_text(json.dumps({"parts": {"a": {"figures": [figure]}}}))
        print("measured")
        return {"met": 0, "missed": 1}.get(mode, 3)
    if mode == "device":
        print(os.environ[VARIABLE], os.getcwd())
        return main("met", file)
    if mode == "hangs":  # refuses SIGTERM, like its child in the same group and the one in a session of its own
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ignored = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
        children = [subprocess.Popen([sys.executable, "-c", ignored], start_new_session=new) for new in (False, True)]
        partial = Path(file).with_suffix(".partial")
        partial.write_text(json.dumps([os.getpid(), *(child.pid for child in children)]))
        partial.replace(file)
        time.sleep(300)
    if mode == "leaves a child":
        child = subprocess.Popen([sys.executable, "-c", SLEEP])
        Path(file).with_suffix(".pid").write_text(str(child.pid))
        return main("met", file)
    if mode == "crashes":
        print("out of memory", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    return 0  # without figures


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
