"""Groups of the weight sync whose two members are threads of this process, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gkd.weight_sync import group as module
from gkd.weight_sync.group import GroupSpec, TransferGroup
from tests.dist import fake_card
from tests.dist.helpers import free_port

CPU = torch.device("cpu")
Join = Callable[..., tuple[TransferGroup, TransferGroup]]


@pytest.fixture
def members() -> Iterator[ThreadPoolExecutor]:
    """A thread for each member."""
    with ThreadPoolExecutor(2, "member") as threads:
        yield threads


@pytest.fixture
def join(members: ThreadPoolExecutor) -> Join:
    """Return a function that makes a group of a sender and a receiver."""

    def made(transport: str, timeout_s: float = 20.0) -> tuple[TransferGroup, TransferGroup]:
        port, barrier = free_port(), threading.Barrier(2)

        def member(rank: int) -> TransferGroup:
            barrier.wait(20)  # so that each has a thread of its own
            return TransferGroup(GroupSpec(transport, "127.0.0.1", port, rank, 2, timeout_s, 20.0), CPU)

        sender, receiver = members.map(member, range(2))
        return sender, receiver

    return made


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the CPU stands for a card's."""
    for name in ("card_id", "shared_handle", "copy_shared"):
        monkeypatch.setattr(module, name, getattr(module, name))
    fake_card.install()


@pytest.mark.usefixtures("card")
def test_an_engine_on_the_card_does_not_wait_for_the_kept_copy(
    monkeypatch: pytest.MonkeyPatch, members: ThreadPoolExecutor, join: Join
) -> None:
    """Fails if the handle is sent after the copy in host memory, or a bucket may be overwritten before it is made."""
    handle_of, kept = module.shared_handle, torch.zeros(8, dtype=torch.uint8)
    at_handle: list[list[int]] = []

    def shared_handle(memory: torch.Tensor) -> bytes:
        at_handle.append(kept.tolist())
        return handle_of(memory)

    monkeypatch.setattr(module, "shared_handle", shared_handle)
    sender, receiver = join("ipc")
    bucket, received = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    receiving: Any = members.submit(receiver.receive_bucket, 8, received)
    members.submit(sender.send_bucket, bucket, kept, None).result(20)
    assert at_handle == [[0] * 8] and kept.tolist() == receiving.result(20).tolist() == list(range(8))
