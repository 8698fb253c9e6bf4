"""vLLM's arguments for its memory on a GPU, for both kinds of engines."""

from __future__ import annotations

from typing import Any

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
