"""How much of what the CUDA caching allocator has taken is free, and whether it is free in one piece.

The allocator takes segments from the device and cuts blocks out of them. A free block serves only requests that fit
into it, of its own stream and pool; only segments that are free as a whole go back to the device. So a rank can run
out of memory that it has.

    external ratio = 1 - largest free block / all free bytes         0: one piece
    unused ratio = (reserved - allocated) / reserved                 0: nothing is kept for later

Each alone means little: any cache of two equal blocks has an external ratio of 0.5, and one free segment, which goes
back to the device when that is needed, may be half of all that is reserved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gkd.log import get_logger
from gkd.memory.remedies import fragmentation_hint
from gkd.memory.usage import gib, used_device

log = get_logger("memory")

# Less than this is not what a training step lacks, however it is cut.
WORTH_A_WARNING = 512 << 20
# Physical pages of expandable segments, by the pool that they are of.
_PAGE = {"small": 2 << 20, "large": 20 << 20}
_CHECK_EVERY = 10


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Bytes of one device, as its allocator sees them."""

    where: str
    allocated: int  # blocks in use, rounded up as the allocator does
    pending: int  # let go, but another stream may still use them: neither allocated nor free
    reserved: int
    free: int  # blocks that can be given out, `elsewhere` included
    largest_free: int
    releasable: int  # of the free bytes, those that `empty_cache` would give back to the device
    elsewhere: int  # of the free bytes, those in pools of small tensors and in private pools, as of CUDA graphs

    @property
    def external_ratio(self) -> float:
        """0 if nothing is free."""
        return 1.0 - self.largest_free / self.free if self.free else 0.0

    @property
    def unused_ratio(self) -> float:
        """0 if nothing is reserved."""
        return (self.reserved - self.allocated) / self.reserved if self.reserved else 0.0

    @property
    def worth_a_warning(self) -> bool:
        """False: so little is stuck in segments that are in use that the ratios mean nothing."""
        return self.free - self.releasable >= WORTH_A_WARNING

    def over(self, limit: float) -> bool:
        """Is much unused, and not in one piece? Both ratios have to be over the limit, see the module."""
        return self.worth_a_warning and min(self.external_ratio, self.unused_ratio) > limit

    def line(self) -> str:
        """For people; GiB."""
        if not self.reserved:
            return f"{self.where}: no memory in torch's caching allocator"
        return (
            f"{self.where}: of {gib(self.reserved)} GiB reserved {gib(self.free)} are free, the largest block "
            f"{gib(self.largest_free)} (external ratio {self.external_ratio:.2f}, unused ratio "
            f"{self.unused_ratio:.2f}); {gib(self.releasable)} of them could go back to the device"
        )


def measure(segments: Sequence[Mapping[str, Any]], where: str) -> Fragmentation:
    """Pure.

    Args:
        segments: of one device, as `torch.cuda.memory_snapshot` gives them.
        where: the device's name.
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
    """Of this device now. Takes the allocator's lock: about a millisecond for each few thousand blocks.

    Without CUDA there is no caching allocator: nothing is free in it.
    """
    if device.type != "cuda":
        return measure([], device.type)
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
    return measure(segments, f"cuda:{index}")


def check_fragmentation(
    device: torch.device | None = None, *, warn: float = 0.2, logger: logging.Logger | None = None
) -> Fragmentation:
    """The same, with a warning that says what to do where both ratios are over `warn`.

    Args:
        device: None: `used_device`.
        logger: None: the project's, "memory".
    """
    found = fragmentation(used_device() if device is None else device)
    if found.over(warn):
        (logger or log).warning(
            "memory is fragmented (memory.fragmentation_warn %g): %s. %s", warn, found.line(), fragmentation_hint()
        )
    return found


class FragmentationWatch:
    """Looks after every tenth training step, the first one included, on CUDA alone.

    A snapshot lists every block, which costs milliseconds; and blocks shift little from one step to the next.

    Args:
        warn: see `memory.fragmentation_warn`; 1 = do not look.
    """

    def __init__(self, device: torch.device, warn: float, logger: logging.Logger) -> None:
        self._device, self._warn, self._logger = device, warn, logger
        self._is_on = device.type == "cuda" and warn < 1.0
        self._n_steps = 0
        self._found: Fragmentation | None = None

    def after_step(self) -> None:
        if self._is_on and self._n_steps % _CHECK_EVERY == 0:
            self._found = check_fragmentation(self._device, warn=self._warn, logger=self._logger)
        self._n_steps += 1

    def take(self) -> dict[str, float]:
        """Both ratios, if it has looked since the last call."""
        found, self._found = self._found, None
        if found is None:
            return {}
        return {"memory/external_ratio": found.external_ratio, "memory/unused_ratio": found.unused_ratio}


def _whole_pages(segment: Mapping[str, Any], block: Mapping[str, Any]) -> int:
    """Bytes of the physical pages that lie wholly within a block of an expandable segment."""
    page = _PAGE[segment["segment_type"]]
    start = block["address"] - segment["address"]
    return max(0, (start + block["size"]) // page - -(-start // page)) * page
