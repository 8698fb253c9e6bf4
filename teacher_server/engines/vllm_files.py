"""Choose where vLLM keeps its sockets and the file of its rendezvous, which outlive a process that is killed."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4


def keep_files_in(folder: Path, remove: Callable[[Path], None]) -> None:
    """Make the engine that this process starts next keep its files in this folder; `remove` it at exit."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    folder.mkdir(mode=0o700, exist_ok=True)
    atexit.register(remove, folder)
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    for executor in (multiproc_executor, uniproc_executor):
        executor.get_file_store_init_method = lambda: f"file://{folder}/vllm_dist_{uuid4().hex}"
