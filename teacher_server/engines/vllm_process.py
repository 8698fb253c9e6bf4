"""Set what both kinds of vLLM engines need: their memory on a GPU, and the folder of their files."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

# vLLM does not start unless `gpu_memory_utilization` of the GPU is free (`request_memory` of its worker), also if the
# size of the KV cache is given. The share decides nothing else then: such an engine needs its weights, one forward pass
# and its cache, on whatever part of the GPU other processes leave. Zero is not accepted.
_FREE = 0.001


def gpu_memory_arguments(share: float, kv_cache_bytes: int | None) -> dict[str, Any]:
    """Return arguments of vLLM.

    Args:
        share: of each GPU, for weights, a forward pass and the KV cache; without effect if the cache has a size.
        kv_cache_bytes: size of the KV cache on each GPU; None takes what the share leaves.
    """
    if kv_cache_bytes is None:
        return {"gpu_memory_utilization": share}
    return {"gpu_memory_utilization": _FREE, "kv_cache_memory_bytes": kv_cache_bytes}


def keep_files_in(folder: Path, remove: Callable[[Path], None]) -> None:
    """Make the engine that this process starts next keep its files in this folder; `remove` it at exit.

    They are its sockets and the file of its rendezvous, which outlive a process that is killed.
    """
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    folder.mkdir(mode=0o700, exist_ok=True)
    atexit.register(remove, folder)
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    for executor in (multiproc_executor, uniproc_executor):
        executor.get_file_store_init_method = lambda: f"file://{folder}/vllm_dist_{uuid4().hex}"
