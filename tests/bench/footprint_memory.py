"""Measure the private memory of a process, now and at its peak. Linux only.

Allocations of 64 KiB and more are mapped one by one (`ENVIRONMENT`) and go back to the kernel when they are freed, so
resident memory equals live memory. On CUDA, torch's allocator is read instead.
"""

from __future__ import annotations

import gc
from pathlib import Path

import torch

# To be in the environment of a process when it starts: glibc reads it once.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_MMAP_MAX_": str(1 << 20), "MALLOC_ARENA_MAX": "1"}


class Meter:
    """Bytes beyond those that were there when it was made, after imports and before any model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            self._base = torch.cuda.memory_allocated(device)
        else:
            self._base, self._base_anonymous = _status("VmRSS"), _anonymous()

    def now(self) -> int:
        """Mapped files left out: weights are read through them."""
        gc.collect()
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device)) - self._base
        return _anonymous() - self._base_anonymous

    def forget_peak(self) -> None:
        """Peaks count from here on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device)) - self._base
        return _status("VmHWM") - self._base


def _anonymous() -> int:
    return _status("RssAnon") + _status("RssShmem")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}: it takes Linux to measure memory here")
