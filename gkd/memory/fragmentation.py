"""Measure the fragmentation of the CUDA caching allocator, and warn of it.

The allocator takes segments from the device and cuts blocks out of them. A free block serves only requests of its own
stream and pool that fit into it, and only a segment without used blocks returns to the device. So an allocation can
fail although enough memory is free.

    external ratio = 1 - largest free block / all free bytes         0: one piece
    unused ratio = (reserved - allocated) / reserved                 0: nothing is cached

Neither is conclusive alone: any cache of two equal blocks has an external ratio of 0.5, and one free segment, which
returns to the device when needed, may be half of the reserved memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gkd.log import get_logger
from gkd.memory.remedies import fragmentation_hint
from gkd.memory.usage import counts_line, gib, read_counts, read_usage, segments, used_device

log = get_logger("memory")

# Less than this does not decide whether a training step fits.
_WORTH_A_WARNING = 512 << 20
# Size of the physical pages of expandable segments, by pool.
_PAGE = {"small": 2 << 20, "large": 20 << 20}
_CHECK_EVERY = 10
_WARN = 0.2  # warn if both ratios are above it


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """The state of one device's allocator, in bytes."""

    where: str
    allocated: int  # blocks in use, rounded up as the allocator does
    pending: int  # released, but another stream may still use them: neither allocated nor free
    reserved: int
    free: int  # bytes in free blocks, including `elsewhere`
    largest_free: int
    releasable: int  # free bytes that `empty_cache` returns to the device
    elsewhere: int  # free bytes in pools for small tensors and in private pools (CUDA graphs)

    @property
    def external_ratio(self) -> float:
        """0 if nothing is free."""
        return 1.0 - self.largest_free / self.free if self.free else 0.0

    @property
    def unused_ratio(self) -> float:
        """0 if nothing is reserved."""
        return (self.reserved - self.allocated) / self.reserved if self.reserved else 0.0

    def over(self, limit: float) -> bool:
        """Return whether both ratios are above the limit, see the module, the unused one also without `releasable`.

        Enough has to be free within used segments, too.
        """
        stuck, kept = self.free - self.releasable, self.reserved - self.releasable
        return stuck >= _WORTH_A_WARNING and min(self.external_ratio, self.unused_ratio, stuck / kept) > limit

    def line(self) -> str:
        """Return a human-readable line, in GiB."""
        if not self.reserved:
            return f"{self.where}: no memory in torch's caching allocator"
        return (
            f"{self.where}: of {gib(self.reserved)} GiB reserved {gib(self.free)} are free, the largest block "
            f"{gib(self.largest_free)} (external ratio {self.external_ratio:.2f}, unused ratio "
            f"{self.unused_ratio:.2f}); {gib(self.releasable)} of them can return to the device"
        )


def measure(segments: Sequence[Mapping[str, Any]], where: str) -> Fragmentation:
    """Return the fragmentation of a snapshot. Pure.

    Args:
        segments: of one device, as in `torch.cuda.memory_snapshot`.
        where: name of the device.
    """
    allocated = pending = free = largest = releasable = elsewhere = 0
    for segment in segments:
        blocks = segment["blocks"]
        unused = [block for block in blocks if block["state"] == "inactive"]
        n_free = sum(block["size"] for block in unused)
        # "active_pending_free", or by its older name "active_awaiting_free".
        in_use = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
        allocated, pending = allocated + in_use, pending + segment["total_size"] - in_use - n_free
        free += n_free
        largest = max([largest, *(block["size"] for block in unused)])
        if segment.get("is_expandable", False):
            releasable += sum(_whole_pages(segment, block) for block in unused)
        elif len(unused) == len(blocks):
            releasable += n_free
        if segment["segment_type"] == "small" or tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            elsewhere += n_free
    reserved = sum(segment["total_size"] for segment in segments)
    return Fragmentation(where, allocated, pending, reserved, free, largest, releasable, elsewhere)


def fragmentation(device: torch.device) -> Fragmentation:
    """Return the present fragmentation of a device. Without CUDA there is no allocator, and all numbers are 0."""
    return measure(segments(device), str(device))


def check_fragmentation(
    device: torch.device | None = None, *, warn: float = _WARN, logger: logging.Logger | None = None
) -> Fragmentation:
    """Log memory in use, fragmentation and the allocator's calls; warn with remedies if both ratios are above `warn`.

    Args:
        device: None: `used_device`.
        logger: None: the project's, "memory".

    Returns:
        The numbers of the fragmentation.
    """
    device, logger = used_device() if device is None else device, logger or log
    found, counts = fragmentation(device), read_counts(device)
    lines = [read_usage(device).line(), found.line()]
    lines += [f"since the process started: {counts_line(counts)}"] if counts else []
    logger.info("memory of this process:\n  %s", "\n  ".join(lines))
    _warn_over(found, warn, logger)
    return found


def _warn_over(found: Fragmentation, warn: float, logger: logging.Logger) -> None:
    if found.over(warn):
        text = "memory is fragmented (both ratios above %g): %s. %s"
        logger.warning(text, warn, found.line(), fragmentation_hint())


class FragmentationWatch:
    """Check fragmentation after every tenth training step, starting with the first. CUDA only.

    A snapshot lists every block, which takes milliseconds, and blocks change little between steps.
    """

    def __init__(self, device: torch.device, logger: logging.Logger) -> None:
        self._device, self._logger = device, logger
        self._n_steps = 0
        self._found: Fragmentation | None = None

    def after_step(self) -> None:
        if self._device.type == "cuda" and self._n_steps % _CHECK_EVERY == 0:
            self._found = fragmentation(self._device)
            _warn_over(self._found, _WARN, self._logger)
        self._n_steps += 1

    def take(self) -> dict[str, float]:
        """Return both ratios, if they were measured since the last call."""
        found, self._found = self._found, None
        if found is None:
            return {}
        return {"memory/external_ratio": found.external_ratio, "memory/unused_ratio": found.unused_ratio}


def _whole_pages(segment: Mapping[str, Any], block: Mapping[str, Any]) -> int:
    """Return the bytes of the physical pages that lie completely within a block of an expandable segment."""
    page = _PAGE[segment["segment_type"]]
    start = block["address"] - segment["address"]
    return max(0, (start + block["size"]) // page - -(-start // page)) * page
