"""Weight transfer between real processes: senders, receivers, and what happens when they disagree.

A sender without memory: test_actor_pools.py.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from gkd.errors import WeightSyncError
from gkd.weight_sync import group as module
from gkd.weight_sync.buckets import TensorSpec, digest, layout, plan_buckets
from gkd.weight_sync.group import GroupSpec, TransferGroup
from gkd.weight_sync.segment import Segment
from gkd.weight_sync.transfer import receive, send
from tests.device import on_cuda, rank_device
from tests.dist import fake_card
from tests.dist.helpers import caught, free_port, run_ranks

SHAPES = [((7, 3), "float32"), ((5,), "bfloat16"), ((), "float32"), ((300, 11), "bfloat16")]
# With CUDA IPC, processes share a card, but here each has its own: tests.bench.bench_weight_sync.
TRANSPORTS = ("gloo", "nccl") if on_cuda() else ("gloo", "shared_memory", "ipc")
pytestmark = pytest.mark.dist


def _install_card(name: str = "card 0") -> None:
    if not on_cuda():
        fake_card.install(name)


def _tensors(stage: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(stage)
    return {
        f"stage{stage}.t{i}": torch.randn(shape, generator=gen).to(rank_device(), getattr(torch, dtype))
        for i, (shape, dtype) in enumerate(SHAPES)
    }


def _plans(n_senders: int) -> list[Any]:
    return [
        plan_buckets(
            [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in _tensors(stage).items()],
            bucket_bytes=1024,
        )
        for stage in range(n_senders)
    ]


def _kept(plan: list[Any], transport: str) -> Any:
    """Return the memory that a sender needs for a transport."""
    return Segment(layout(plan)[1]) if transport in ("shared_memory", "auto") else None


def _exchange(rank: int, world_size: int, ports: list[int], transport: str) -> dict[str, str]:
    """Send on the first ranks, one for each group, and receive on the others. Return the digests by tensor."""
    _install_card()
    n_senders = len(ports)
    n_members = 1 + world_size - n_senders
    digests: dict[str, str] = {}

    def join(port: int, member: int) -> TransferGroup:
        made = TransferGroup(GroupSpec(transport, "127.0.0.1", port, member, n_members, 30.0, 30.0), rank_device())
        assert made.transport == transport.replace("auto", "shared_memory")
        return made

    plans = _plans(n_senders)
    if rank < n_senders:
        group, kept = join(ports[rank], 0), _kept(plans[rank], transport)
        for _ in range(2):  # a group serves many syncs
            digests |= send(group, plans[rank], iter(_tensors(rank).items()), with_digests=True, kept=kept)
    else:
        groups = [join(port, 1 + rank - n_senders) for port in ports]
        for _ in range(2):
            for group, buckets in zip(groups, plans, strict=True):
                receive(
                    group, buckets, lambda tensors: digests.update({n: digest(t, rank_device()) for n, t in tensors})
                )
    return digests


@pytest.mark.parametrize("transport", TRANSPORTS if on_cuda() else (*TRANSPORTS, "auto"))
@pytest.mark.parametrize(("n_senders", "n_receivers"), [(1, 2), (2, 1)])
def test_every_receiver_has_the_senders_weights(n_senders: int, n_receivers: int, transport: str) -> None:
    """Fails if an engine samples from other weights than the actor's."""
    ranks = run_ranks(_exchange, n_senders + n_receivers, [free_port() for _ in range(n_senders)], transport)
    sent = {name: value for part in ranks[:n_senders] for name, value in part.items()}
    assert len(sent) == n_senders * len(SHAPES)
    assert all(part == sent for part in ranks[n_senders:])


@pytest.mark.parametrize("kind", ["order", "short"])
def test_tensors_that_differ_from_the_plan_are_refused(kind: str) -> None:
    """Fails if tensors are received under wrong names, which a shape check would not detect."""
    tensors = list(_tensors(0).items())
    stream = {"order": tensors[::-1], "short": tensors[:-1]}[kind]
    with pytest.raises(WeightSyncError):
        send(None, _plans(1)[0], iter(stream), with_digests=False)


def _join_alone(rank: int, world_size: int, port: int) -> tuple[str, str]:
    return caught(lambda: TransferGroup(GroupSpec("gloo", "127.0.0.1", port, 1, 2, 2.0, 2.0), rank_device()))


def test_a_missing_member_is_a_timeout() -> None:
    """Fails if the first sync hangs, or the error lacks the rank or the address."""
    port = free_port()
    ((kind, message),) = run_ranks(_join_alone, 1, port)
    assert kind == "WeightSyncError" and "rank 1 of 2" in message and f"127.0.0.1:{port}" in message


def _damage(rank: int, world_size: int, port: int, transport: str) -> tuple[str, str, int]:
    """Flip a byte of the second bucket on rank 1. Return this rank's error, and the number of buckets it loaded."""
    (plan,) = _plans(1)
    wrong = 1
    _install_card()
    if rank == 1:
        attached, broadcast = module.attached, module.TransferGroup.broadcast
        payloads: list[torch.Tensor] = []
        copy_shared = module.copy_shared

        def damaged_card(handle: bytes, buffer: torch.Tensor) -> None:
            copy_shared(handle, buffer)
            payloads.append(buffer)
            if len(payloads) == wrong + 1:
                buffer[0] ^= 1

        def damaged_segment(segment: Any) -> torch.Tensor:
            copy = attached(segment).clone()
            copy[layout(plan)[0][wrong]] ^= 1
            return copy

        def damaged_broadcast(self: Any, buffer: torch.Tensor, *, on_host: bool = False) -> None:
            broadcast(self, buffer, on_host=on_host)
            # A bucket: not a header, nor the single byte that connects NCCL's members.
            if buffer.dtype == torch.uint8 and transport in ("gloo", "nccl") and len(buffer) > 1:
                payloads.append(buffer)
                if len(payloads) == wrong + 1:
                    buffer[0] ^= 1

        module.attached, module.TransferGroup.broadcast = damaged_segment, damaged_broadcast  # type: ignore[method-assign]
        module.copy_shared = damaged_card
    spec = module.GroupSpec(transport, "127.0.0.1", port, rank, world_size, 120.0, 60.0)
    group, loads = module.TransferGroup(spec, rank_device()), []
    if rank == 0:
        kept = _kept(plan, transport)
        error = caught(lambda: send(group, plan, iter(_tensors(0).items()), with_digests=False, kept=kept))
    else:
        error = caught(lambda: receive(group, plan, loads.append))
    return *error, len(loads)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_damaged_bucket_is_refused(transport: str) -> None:
    """Fails if an engine loads bytes that were damaged on their way, or the error lacks the bucket and its tensors."""
    _, (kind, text, n_loaded), (_, _, n_others) = run_ranks(_damage, 3, free_port(), transport, timeout_s=90.0)
    assert kind == "WeightSyncError" and "member 1" in text and "bucket 1" in text and "stage0.t3" in text
    assert n_loaded <= 1, "the damaged bucket was loaded"
    assert n_others <= 2


def _on_two_cards(rank: int, world_size: int, port: int) -> tuple[str, str]:
    _install_card(f"card {rank}")
    return caught(lambda: TransferGroup(GroupSpec("ipc", "127.0.0.1", port, rank, 2, 60.0, 60.0), rank_device()))


def test_members_on_two_cards_are_refused() -> None:
    """Fails if a handle is opened on another card, or the error lacks key and fix."""
    found = run_ranks(_on_two_cards, 2, free_port())
    assert [kind for kind, _ in found] == ["WeightSyncError"] * 2
    # The sender has the store: the other may lose it first.
    assert "weight_sync.transport = ipc" in found[0][1] and "[1]" in found[0][1] and "Fix" in found[0][1]


def _orphaned(rank: int, world_size: int, port: int, transport: str) -> tuple[str, str]:
    """Kill the sender (rank 0) between two buckets. Return the receiver's error."""
    (plan,) = _plans(1)
    _install_card()
    if rank == 0 and os.fork():
        return "", ""
    spec = GroupSpec(transport, "127.0.0.1", port, rank, 2, 120.0, 60.0)
    group = TransferGroup(spec, rank_device())
    if rank == 0:
        tensors = list(_tensors(0).items())

        def exported() -> Any:
            yield from tensors[:3]
            os.kill(os.getpid(), signal.SIGKILL)

        send(group, plan, exported(), with_digests=False, kept=_kept(plan, transport))
    return caught(lambda: receive(group, plan, lambda tensors: None))


@pytest.mark.cpu_only("forks a rank; with NCCL a killed sender is found by the header, which is gloo's")
@pytest.mark.parametrize("transport", ["shared_memory", "ipc"])
def test_a_killed_sender_is_an_error_of_the_receivers(transport: str) -> None:
    """Fails if an engine waits for the time-out of a bucket when the actor's rank has died."""
    _, (kind, _) = run_ranks(_orphaned, 2, free_port(), transport, timeout_s=90.0)
    assert kind in {"TransferCutOff", "WeightSyncError"}  # the second if it dies while the engine joins
