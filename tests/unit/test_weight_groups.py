"""Groups of the weight sync whose two members are threads of this process, over real sockets; errors on their way."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gkd.errors import ClusterError, TransferCutOff, WeightSyncError
from gkd.rollout.vllm.worker_errors import SyncFailure, raise_sync_error, returns_sync_errors
from gkd.weight_sync import group as module
from gkd.weight_sync.buckets import Bucket, TensorSpec
from gkd.weight_sync.group import GroupSpec, TransferGroup
from gkd.weight_sync.segment import KeptVersion, Segment, attached
from gkd.weight_sync.transfer import _mover, failing_together
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
            barrier.wait(30)  # so that each has a thread of its own
            return TransferGroup(GroupSpec(transport, "127.0.0.1", port, rank, 2, timeout_s, 20.0), CPU)

        sender, receiver = [members.submit(member, rank) for rank in range(2)]
        return sender.result(40), receiver.result(40)

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
    members.submit(sender.send_bucket, bucket, kept, None).result(30)
    assert at_handle == [[0] * 8] and kept.tolist() == receiving.result(30).tolist() == list(range(8))


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member is on a host of its own."""
    monkeypatch.setattr(module, "host_id", lambda: threading.current_thread().name)


@pytest.mark.usefixtures("two_hosts")
def test_auto_crosses_hosts_by_gloo(members: ThreadPoolExecutor, join: Join) -> None:
    """Fails if an engine on another host is given a place in memory that it cannot open."""
    sender, receiver = join("auto")
    assert sender.transport == receiver.transport == "gloo"
    receiving: Any = members.submit(receiver.receive_bucket, 4, torch.zeros(4, dtype=torch.uint8))
    sender.send_bucket(torch.arange(4, dtype=torch.uint8), None, None)
    assert receiving.result(30).tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("two_hosts")
def test_shared_memory_of_two_hosts_is_refused(join: Join) -> None:
    """Fails if the first sync fails instead of the start, or the error lacks the key, the members or the fix."""
    with pytest.raises(WeightSyncError) as caught:
        join("shared_memory")
    assert all(part in str(caught.value) for part in ("weight_sync.transport = shared_memory", "[1]", "Fix"))


def test_a_bucket_that_does_not_arrive_in_time_ends_the_transfer(join: Join) -> None:
    """Fails if a member waits for ever, its error lacks its rank, or it uses the connection again."""
    sender, receiver = join("gloo", timeout_s=0.3)
    for _ in range(2):  # it has left the group after the first
        with pytest.raises(TransferCutOff, match="rank 1 of 2"):
            receiver.receive_bucket(4, torch.zeros(4, dtype=torch.uint8))
    assert sender.transport == "gloo", "the sender was there"


def test_memory_that_cannot_be_opened_names_the_fix() -> None:
    """Fails if a sender that is gone, or has less memory, ends an engine in an error without key and fix."""
    made = Segment(4096)
    assert torch.equal(attached(made.id), made.bytes)
    with pytest.raises(WeightSyncError) as short:
        attached(replace(made.id, n_bytes=8192))
    gone = replace(made.id, fd=10**6)
    with pytest.raises(WeightSyncError) as closed:
        attached(gone)
    for caught, path in ((short, f"/proc/{made.id.pid}/fd/{made.id.fd}"), (closed, f"/proc/{gone.pid}/fd/{gone.fd}")):
        assert all(part in str(caught.value) for part in ("weight_sync.transport", path, "Fix"))


def test_an_incomplete_version_is_not_given_to_an_engine() -> None:
    """Fails if a restarted engine gets the weights of a push that failed in the middle."""
    kept, bucket = KeptVersion(), Bucket((TensorSpec("a", (8,), "uint8"),), (0,), 8)
    for content in ("base", "adapters"):
        with kept.replacing(content, [bucket], pinned=False):
            pass
    with pytest.raises(TransferCutOff), kept.replacing("adapters", [bucket], pinned=False):
        raise TransferCutOff("cut off")
    assert kept.complete("base")[0] == [bucket]
    for missing in ("adapters", "merged"):
        with pytest.raises(WeightSyncError, match=missing):
            kept.complete(missing)


def test_a_member_that_dies_while_the_group_forms_is_not_waited_for_as_for_a_bucket() -> None:
    """Fails if the others wait for it for trainer.stage_timeout_s, in which no engine can be given weights."""
    spec = GroupSpec("gloo", "127.0.0.1", free_port(), 0, 2, timeout_s=600.0, join_s=2.0)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(TransferGroup, spec, CPU)
        store = dist.TCPStore(spec.host, spec.port, 2, is_master=False, wait_for_workers=False)
        store.set("host 1", "another host")  # and it is gone
        with pytest.raises(WeightSyncError):
            joining.result(timeout=60)


def test_the_moving_thread_uses_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a bucket is overwritten while it is loaded: vLLM loads on a stream of its own."""
    callers, selected = object(), list[Any]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: callers)
    monkeypatch.setattr(torch.cuda, "set_stream", selected.append)
    with _mover(SimpleNamespace(device=torch.device("cuda", 0))) as mover:
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


@returns_sync_errors
def receive(error: Exception | None) -> int:
    if error is not None:
        raise error
    return 7


def test_a_worker_returns_no_exception() -> None:
    """Fails if vLLM replaces a broken transfer by a RuntimeError, for which the engine is killed and started again."""
    result = pickle.loads(pickle.dumps(receive(TransferCutOff("lost"))))
    assert isinstance(result, SyncFailure) and not isinstance(result, BaseException)
    assert type(result.error) is TransferCutOff and str(result.error) == "lost"
    assert receive(None) == 7
    with pytest.raises(ClusterError):
        receive(ClusterError("another error"))


def test_the_error_that_explains_the_others_is_raised() -> None:
    """Fails if the error of a worker is hidden by those of the workers whose connection it closed."""
    raise_sync_error([7, 7])
    results = [receive(TransferCutOff("lost")), receive(None), receive(WeightSyncError("wrong digest"))]
    with pytest.raises(WeightSyncError) as caught:
        raise_sync_error(results)
    assert caught.value is results[2].error  # type: ignore[union-attr]
    with pytest.raises(TransferCutOff):
        raise_sync_error(results[:2])
