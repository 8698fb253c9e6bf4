"""How much memory a process has in use now, on its device and on its host.

On CUDA the caching allocator and the driver say so. Without CUDA there is no device: the bytes that the offload code
keeps "on the device" are counted by an `Arena`, so that its bookkeeping can be tested. Such a number says nothing of
any GPU, and is labelled.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType

import psutil
import torch

GIB = 2**30
ARENA_LABEL = "cpu arena"


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes."""

    where: str  # "cuda:0", or ARENA_LABEL
    allocated: int  # in tensors
    reserved: int  # what the caching allocator has taken from the device; an arena has none: as allocated
    peak: int  # most that was allocated at once since `reset_peak`
    free: int | None  # of the whole device, whoever uses the rest; None: there is no device
    total: int | None
    host_rss: int  # of this process, memory that it shares with others included

    def line(self) -> str:
        """For people; GiB."""
        free, total = self.free, self.total
        device = "" if free is None or total is None else f", {gib(free)} of the device's {gib(total)} free"
        return (
            f"{self.where}: allocated {gib(self.allocated)}, reserved {gib(self.reserved)}, peak {gib(self.peak)}"
            f"{device}; host RSS {gib(self.host_rss)} GiB"
        )


class Arena:
    """Adds up what others say they keep on a device that is not there.

    It sees only what it is told, and only when it is asked: a peak is the largest sum that was read, not the largest
    there was.
    """

    def __init__(self) -> None:
        self._meters: dict[str, Callable[[], Callable[[], int] | None]] = {}
        self._peak = 0

    def add(self, name: str, n_bytes: Callable[[], int]) -> None:
        """Count what `n_bytes` says under this name, in place of what was counted there before.

        The object of a bound method is not kept alive; when it is gone, its bytes are, too.
        """
        self._meters[name] = weakref.WeakMethod(n_bytes) if isinstance(n_bytes, MethodType) else lambda: n_bytes

    def remove(self, name: str) -> None:
        """Raises KeyError: nothing is counted under that name."""
        del self._meters[name]

    def by_name(self) -> dict[str, int]:
        """Bytes now, of all that are still there."""
        meters = {name: meter() for name, meter in self._meters.items()}
        found = {name: meter() for name, meter in meters.items() if meter is not None}
        self._peak = max(self._peak, sum(found.values()))
        return found

    def allocated(self) -> int:
        return sum(self.by_name().values())

    def peak(self) -> int:
        """See the class."""
        self.allocated()
        return self._peak

    def reset_peak(self) -> None:
        self._peak = 0


ARENA = Arena()


def used_device() -> torch.device:
    """The CUDA device of this process, if it has used CUDA; else the CPU. Begins no use of CUDA."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def read_usage(device: torch.device) -> MemoryUsage:
    """What is in use now. Waits for nothing: memory that kernels under way still need counts as they left it."""
    host_rss = psutil.Process().memory_info().rss
    if device.type != "cuda":
        allocated = ARENA.allocated()
        return MemoryUsage(ARENA_LABEL, allocated, allocated, ARENA.peak(), None, None, host_rss)
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUsage(
        where=str(device),
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device),
        free=free,
        total=total,
        host_rss=host_rss,
    )


def reset_peak(device: torch.device) -> None:
    """From now on `MemoryUsage.peak` is of what comes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        ARENA.reset_peak()


def log_gpu_memory_usage(head: str, logger: logging.Logger, rank: int, device: torch.device | None = None) -> None:
    """One line: `head`, the rank, and what is in use.

    Args:
        device: None: `used_device`.
    """
    logger.info("%s: rank %d, %s", head, rank, read_usage(used_device() if device is None else device).line())


def clear_memory(device: torch.device | None = None) -> int:
    """Collect garbage and give back to the device what the caching allocator keeps; the bytes it gave back.

    Waits for the device, and makes the next allocations slow: they go to the driver. Nothing for the middle of a step.

    Args:
        device: None: `used_device`.
    """
    device = used_device() if device is None else device
    if device.type != "cuda":
        before = ARENA.allocated()
        gc.collect()
        return before - ARENA.allocated()
    before = torch.cuda.memory_reserved(device)
    gc.collect()
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # first: what other processes no longer use goes back to the cache
        torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved(device)


def gib(n_bytes: int) -> str:
    """Without the unit; also small ones can be told from nothing."""
    return f"{n_bytes / GIB:.2f}" if n_bytes >= GIB / 10 or n_bytes <= 0 else f"{n_bytes / GIB:.2g}"
