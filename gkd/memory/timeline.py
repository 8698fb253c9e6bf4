"""Memory of each phase of a rank's work, as numbers for metrics.jsonl, and of all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from gkd.memory.usage import ARENA_LABEL, GIB, MemoryUsage, read_usage, reset_peak


class Timeline:
    """Notes what is in use when a phase ends, and the most that was allocated within it.

    It owns the device's peak: it is reset where a phase begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: str | None = None
        self._phases: dict[str, dict[str, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note this block under the name, also if it raises. Of several blocks of a name the largest numbers count.

        Raises RuntimeError: another phase is open. They do not nest: the inner one would take the outer one's peak.
        """
        if self._open is not None:
            raise RuntimeError(f"memory phase {name} begins inside phase {self._open}; phases do not nest")
        self._open = name
        reset_peak(self._device)
        try:
            yield
        finally:
            self._open = None
            found, before = _numbers(name, read_usage(self._device)), self._phases.get(name, {})
            self._phases[name] = {key: max(value, before.get(key, 0.0)) for key, value in found.items()}

    def take(self) -> dict[str, float]:
        """The phases since the last call: `memory/<phase>/allocated_gib`, `reserved_gib`, `peak_gib`, `host_rss_gib`.

        Without CUDA: `memory/<phase>/arena_gib`, `arena_peak_gib` and `host_rss_gib`, so that nobody reads them as a
        device's.
        """
        phases, self._phases = self._phases, {}
        return {key: value for numbers in phases.values() for key, value in numbers.items()}


def _numbers(phase: str, usage: MemoryUsage) -> dict[str, float]:
    if usage.where == ARENA_LABEL:
        sizes = {"arena": usage.allocated, "arena_peak": usage.peak}
    else:
        sizes = {"allocated": usage.allocated, "reserved": usage.reserved, "peak": usage.peak}
    sizes["host_rss"] = usage.host_rss
    return {f"memory/{phase}/{name}_gib": n_bytes / GIB for name, n_bytes in sizes.items()}


def merge(per_rank: Sequence[Mapping[str, float]], *, each: bool = False) -> dict[str, float]:
    """Of each number the largest of all ranks, and of each peak the lowest rank that had it, `..._rank`.

    Args:
        per_rank: what each rank took, by rank; ranks may lack some of the numbers.
        each: every rank's peaks, too, `.../rank_<rank>`.
    """
    merged: dict[str, float] = {}
    for rank, numbers in enumerate(per_rank):
        for name, value in numbers.items():
            if each and name.endswith("peak_gib"):
                merged[f"{name}/rank_{rank}"] = value
            if name in merged and value <= merged[name]:
                continue
            merged[name] = value
            if name.endswith("peak_gib"):
                merged[f"{name.removesuffix('_gib')}_rank"] = float(rank)
    return merged
