"""The allocator's calls of each step. A GPU's numbers are in tests/gpu."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from gkd.actor.rank import RankMemory
from gkd.config.load import load_config
from gkd.memory.usage import CountMeter, read_counts
from gkd.spans import SpanRecorder

_COUNTS = ("alloc_retries", "ooms", "device_allocs", "device_frees")
NAMES = [f"memory/{name}" for name in _COUNTS]


def test_each_step_has_its_own_counts() -> None:
    """Fails if a step reports the calls of the steps before it, or one count under the name of another."""
    counts = (dict(zip(_COUNTS, row, strict=True)) for row in [(0, 0, 100, 1), (3, 1, 160, 51), (3, 1, 160, 51)])
    meter = CountMeter(torch.device("cuda", 0), read=lambda device: next(counts))
    taken = [meter.take() for _ in range(3)]
    assert [list(numbers) for numbers in taken] == [NAMES] * 3
    assert [list(numbers.values()) for numbers in taken] == [[0, 0, 100, 1], [3, 1, 60, 50], [0, 0, 0, 0]]


def test_a_rank_reports_torchs_own_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a count is read under a name that torch does not use for it, or is not in a rank's metrics."""
    stats, cuda = {"num_alloc_retries": 1, "num_ooms": 2, "num_device_alloc": 3, "num_device_free": 4}, "cuda:0"
    assert all(f'"{name}"' in (torch.cuda.memory_stats.__doc__ or "") for name in stats)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert read_counts(torch.device(cuda)) == dict(zip(_COUNTS, (1, 2, 3, 4), strict=True))
    config, log = load_config(None, []), logging.getLogger("test_allocator_counts")
    rank = RankMemory(config, torch.device(cuda), tmp_path, "actor rank 0", SpanRecorder("actor 0"), log)
    assert rank.take() == dict(zip(NAMES, (1, 2, 3, 4), strict=True))


def test_without_cuda_there_are_none() -> None:
    """Fails if a run on CPU reports counts of an allocator that it does not have."""
    cpu = torch.device("cpu")
    assert read_counts(cpu) == {} and CountMeter(cpu).take() == {}
