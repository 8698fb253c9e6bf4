"""Count what the CUDA caching allocator does each step: calls of the driver, and retries after a failed one.

If cudaMalloc fails, the allocator waits for the device, gives its whole cache back, and tries again. The step goes on,
only slower: such a run has no error, and cudaMalloc and cudaFree in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True, slots=True)
class AllocatorCounts:
    """Calls of this process on one device, since it started."""

    alloc_retries: int = 0  # cudaMalloc failed, and was repeated after the cache had been given back
    ooms: int = 0  # errors raised, because the repeated cudaMalloc failed too
    device_allocs: int = 0  # cudaMalloc, or cuMemMap of expandable segments
    device_frees: int = 0  # cudaFree, or cuMemUnmap

    def line(self) -> str:
        return (
            f"{self.alloc_retries} retries after a failed cudaMalloc, {self.ooms} out-of-memory errors, "
            f"{self.device_allocs} cudaMalloc, {self.device_frees} cudaFree"
        )


def read_counts(device: torch.device) -> AllocatorCounts | None:
    """Return the counts of a device until now; None without CUDA."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)  # empty before the first allocation
    return AllocatorCounts(
        alloc_retries=stats.get("num_alloc_retries", 0),
        ooms=stats.get("num_ooms", 0),
        device_allocs=stats.get("num_device_alloc", 0),
        device_frees=stats.get("num_device_free", 0),
    )


class CountMeter:
    """The counts since the last call of `take`.

    Args:
        read: tests without a GPU give their own.
    """

    def __init__(
        self, device: torch.device, *, read: Callable[[torch.device], AllocatorCounts | None] = read_counts
    ) -> None:
        self._device, self._read = device, read
        self._before = AllocatorCounts()

    def take(self) -> dict[str, float]:
        """Return `memory/alloc_retries`, `ooms`, `device_allocs` and `device_frees`; empty without CUDA."""
        now = self._read(self._device)
        if now is None:
            return {}
        before, self._before = asdict(self._before), now
        return {f"memory/{name}": float(value - before[name]) for name, value in asdict(now).items()}
