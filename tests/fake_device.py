"""A device with settable memory numbers, for tests of the code that reads a device's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gkd.memory.usage import GIB, MemoryUsage, read_usage


@dataclass
class FakeDevice:
    """Report `gib` as allocated, with the peak since the last reset, in place of a CUDA device.

    The peak is updated when the memory is read, as the numbers change without a hook.
    """

    gib: float = 0.0
    peak: float = 0.0

    def read(self, device: torch.device) -> MemoryUsage:
        self.peak = max(self.peak, self.gib)
        n_bytes, peak = int(self.gib * GIB), int(self.peak * GIB)
        return MemoryUsage("fake", read_usage(device).host_rss, n_bytes, n_bytes, peak)

    def reset_peak(self, device: torch.device) -> None:
        self.peak = self.gib
