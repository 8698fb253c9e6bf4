"""Test what surrounds the transfer of buckets: the stream of the thread that moves them, and the end after an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gkd.weight_sync.transfer import _mover, failing_together


def test_the_moving_thread_uses_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a bucket is overwritten while it is loaded: vLLM loads on a stream of its own."""
    callers, selected = object(), list[Any]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: callers)
    monkeypatch.setattr(torch.cuda, "set_stream", selected.append)
    group: Any = SimpleNamespace(device=torch.device("cuda", 0))
    with _mover(group) as mover:
        mover.submit(lambda: None).result()
    assert selected == [callers]


def test_an_error_of_the_sender_ends_the_transfer_and_not_the_export() -> None:
    """Fails if the other exporting ranks wait in the middle of the export, or the engines for the next bucket."""
    closed: list[bool] = []
    group: Any = SimpleNamespace(close=lambda: closed.append(True))
    tensors = iter(range(5))
    with pytest.raises(ValueError, match="first"), failing_together(group, tensors):
        next(tensors)
        raise ValueError("first")
    assert closed == [True] and list(tensors) == []
    with failing_together(group, tensors := iter(range(2))):
        next(tensors)
    assert closed == [True] and list(tensors) == [1]
