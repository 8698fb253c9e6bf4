"""Stand in for a stage of gpu_proof: `python -m tests.unit.proof_child MODE [FILE]`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def main(mode: str, file: str) -> int:
    if mode == "crashes":
        print("out of memory", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    figure = {"name": "speed", "value": 0.5, "unit": "GB/s", "goal": ">= 0.4", "met": mode != "missed", "note": ""}
    Path(file).write_text(json.dumps({"parts": {"a": {"figures": [figure], "tables": []}}}))
    if mode == "hangs":
        signal.pause()
    return {"met": 0, "missed": 1}.get(mode, 3)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
