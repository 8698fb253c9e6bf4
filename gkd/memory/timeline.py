"""Record the memory of each phase of a rank's work for metrics.jsonl, and merge the numbers of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from gkd.memory.offload_manager import GIB
from gkd.memory.usage import MemoryUsage, read_usage, reset_peak
from gkd.spans import Phase


class Timeline:
    """Record the memory in use at the end of each phase, and the peak within it.

    The timeline owns the device's peak counter and resets it at the start of every phase, so phases must not nest:
    record them by `SpanRecorder.span` with `outermost`.

    Args:
        read, reset: read the device's memory and restart its peak; tests without a GPU give their own.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        read: Callable[[torch.device], MemoryUsage] = read_usage,
        reset: Callable[[torch.device], None] = reset_peak,
    ) -> None:
        self._device, self._read, self._reset = device, read, reset
        self._phases: dict[str, dict[str, float]] = {}

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Record the memory of a block, also if it raises. Several blocks of one phase keep the largest numbers."""
        name = phase.metric
        self._reset(self._device)
        try:
            yield
        finally:
            found, before = _numbers(name, self._read(self._device)), self._phases.get(name, {})
            self._phases[name] = {key: max(value, before.get(key, 0.0)) for key, value in found.items()}

    def take(self) -> dict[str, float]:
        """Return the phases since the last call: `memory/<phase>/allocated_gib`, `reserved_gib`, `peak_gib` and
        `host_rss_gib`; without CUDA only the last.
        """
        phases, self._phases = self._phases, {}
        return {key: value for numbers in phases.values() for key, value in numbers.items()}


def _numbers(phase: str, usage: MemoryUsage) -> dict[str, float]:
    sizes = {
        "allocated": usage.allocated,
        "reserved": usage.reserved,
        "peak": usage.peak,
        "host_rss": usage.host_rss,
    }
    return {f"memory/{phase}/{name}_gib": size / GIB for name, size in sizes.items() if size is not None}


def merge(per_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the maximum of each number over all ranks, and for each peak the lowest rank that has it, `..._rank`.

    Args:
        per_rank: the numbers of each rank, by rank; a rank may lack some of them.
    """
    merged: dict[str, float] = {}
    for rank, numbers in enumerate(per_rank):
        for name, value in numbers.items():
            if name in merged and value <= merged[name]:
                continue
            merged[name] = value
            if name.endswith("peak_gib"):
                merged[f"{name.removesuffix('_gib')}_rank"] = float(rank)
    return merged
