"""Measure times on a CUDA device with its events, on a CPU with the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def median_ms(action: Callable[[], Any], rounds: int, *, warm_up: int = 5, device: str = "cuda") -> float:
    """Return the median time of one call. The first calls, which compile and allocate, are discarded."""
    for _ in range(warm_up):
        action()
    return statistics.median(_on_cpu(action) if device == "cpu" else _on_cuda(action) for _ in range(rounds))


def _on_cuda(action: Callable[[], Any]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    action()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _on_cpu(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - began)
