"""Test the thread that moves the buckets of a weight sync."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gkd.weight_sync.transfer import _mover


def test_the_moving_thread_uses_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a bucket is overwritten while it is loaded: vLLM loads on a stream of its own."""
    callers, selected = object(), list[Any]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: callers)
    monkeypatch.setattr(torch.cuda, "set_stream", selected.append)
    group: Any = SimpleNamespace(device=torch.device("cuda", 0))
    with _mover(group) as mover:
        mover.submit(lambda: None).result()
    assert selected == [callers]
