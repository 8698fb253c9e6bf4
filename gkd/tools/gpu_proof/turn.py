"""Let a process that gpu_proof has started ahead of its turn wait for the GPU."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path

TURN = "GKD_GPU_PROOF_TURN"  # environment variable: a file that exists from the turn on
LONGEST_S = 1800.0


def wait_for_turn(*modules: str) -> None:
    """Block until another stage no longer has the GPU; call it before the first use of CUDA.

    Returns at once in a process that gpu_proof has not started ahead.

    Args:
        modules: imported before, because the caller imports them later.

    Raises:
        TimeoutError: half an hour has passed; gpu_proof was killed.
    """
    if TURN not in os.environ:
        return
    for module in modules:
        importlib.import_module(module)
    deadline = time.monotonic() + LONGEST_S
    while not Path(os.environ[TURN]).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{os.environ[TURN]} did not appear within {LONGEST_S:.0f} s")
        time.sleep(0.02)
