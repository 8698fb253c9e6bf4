"""Measure the fragmentation of the CUDA caching allocator, and warn of it.

The allocator takes segments from the device and cuts blocks out of them. A free block serves only requests that fit
into it, and only a segment without used blocks returns to the device. So an allocation can fail although enough memory
is free. Expandable segments are made of pages, which the allocator can join: they have no such blocks.

    ratio = bytes of free blocks in segments that are in use / bytes of all segments
"""

from __future__ import annotations

import logging

import torch

from gkd.config.schema_rollout import ALLOCATOR_VARIABLES, EXPANDABLE

_WARN = 0.2
_LEAST = 512 << 20  # bytes
ADVICE = (
    f"If memory runs out: set {ALLOCATOR_VARIABLES[1]}={EXPANDABLE} in the environment that the trainer is started in "
    "(with cluster.ray_address: in that of `ray start` on each node), or set a smaller "
    "actor.max_tokens_per_micro_batch, with which micro-batches have similar sizes."
)


def fragmentation(device: torch.device) -> float:
    """Return the ratio; 0 without CUDA, or if nothing is reserved."""
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    reserved = stats.get("reserved_bytes.all.current", 0)
    return stats["inactive_split_bytes.all.current"] / reserved if reserved else 0.0


def warn_of_fragmentation(device: torch.device, logger: logging.Logger) -> float:
    """Return the ratio. Warn with advice if it is above 0.2, unless less than 512 MiB are reserved."""
    ratio = fragmentation(device)
    if ratio > _WARN and torch.cuda.memory_reserved(device) >= _LEAST:
        text = "memory of %s is fragmented: %.0f%% of torch's segments are free blocks in segments in use. %s"
        logger.warning(text, device, 100 * ratio, ADVICE)
    return ratio
