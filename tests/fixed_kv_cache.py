"""Let vLLM start on a GPU whose other processes allocate and free memory meanwhile."""

from __future__ import annotations

from functools import partial


def fix_kv_cache(mib: int) -> None:
    """Give the vLLM engines of this process a KV cache of this size. Set vLLM's environment variables before.

    Otherwise vLLM compares the free memory of the GPU before and after a trial forward pass, and fails if another
    process has freed some of it.
    """
    import vllm

    for name in ("LLM", "EngineArgs"):
        setattr(vllm, name, partial(getattr(vllm, name), kv_cache_memory_bytes=mib << 20))
