"""Measure device times with CUDA events."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def median_ms(action: Callable[[], Any], rounds: int, *, warm_up: int = 5) -> float:
    """Return the median time of one call. The first calls, which compile and allocate, are discarded."""
    for _ in range(warm_up):
        action()
    times = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)
