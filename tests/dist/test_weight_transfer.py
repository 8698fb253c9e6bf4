"""Weight transfer between real processes over gloo: senders, receivers, and what happens when they disagree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.helpers import free_port, run_gloo

SHAPES = [((7, 3), "float32"), ((5,), "bfloat16"), ((), "float32"), ((300, 11), "bfloat16")]
pytestmark = pytest.mark.dist


def _tensors(stage: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(stage)
    return {
        f"stage{stage}.t{i}": torch.randn(shape, generator=gen).to(getattr(torch, dtype))
        for i, (shape, dtype) in enumerate(SHAPES)
    }


def _plans(n_senders: int) -> list[Any]:
    from gkd.weight_sync.buckets import TensorSpec, plan_buckets

    return [
        plan_buckets(
            [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in _tensors(stage).items()],
            bucket_bytes=1024,
        )
        for stage in range(n_senders)
    ]


def _exchange(rank: int, world_size: int, ports: list[int]) -> dict[str, str]:
    """The first ranks send, one a group; the others receive from all. Digests of what was sent, or is held."""
    from gkd.weight_sync.buckets import digest
    from gkd.weight_sync.transfer import GroupSpec, TransferGroup, receive, send

    n_senders = len(ports)
    n_members = 1 + world_size - n_senders
    held: dict[str, str] = {}

    def join(port: int, member: int) -> TransferGroup:
        return TransferGroup(GroupSpec("gloo", "127.0.0.1", port, member, n_members, 30.0), torch.device("cpu"))

    plans = _plans(n_senders)
    if rank < n_senders:
        group = join(ports[rank], 0)
        for _ in range(2):  # a group serves many syncs
            held |= send(group, plans[rank], iter(_tensors(rank).items()), with_digests=True)
    else:
        groups = [join(port, 1 + rank - n_senders) for port in ports]
        for _ in range(2):
            for group, buckets in zip(groups, plans, strict=True):
                receive(group, buckets, lambda tensors: held.update({n: digest(t) for n, t in tensors}))
    return held


@pytest.mark.parametrize(("n_senders", "n_receivers"), [(1, 2), (2, 1)])
def test_every_receiver_holds_what_the_senders_sent(n_senders: int, n_receivers: int) -> None:
    """If it fails, an engine samples from other weights than the actor's."""
    held = run_gloo(_exchange, n_senders + n_receivers, [free_port() for _ in range(n_senders)])
    sent = {name: value for part in held[:n_senders] for name, value in part.items()}
    assert len(sent) == n_senders * len(SHAPES)
    assert all(part == sent for part in held[n_senders:])


def _wrong_stream(rank: int, world_size: int, kind: str) -> str:
    from gkd.errors import WeightSyncError
    from gkd.weight_sync.transfer import send

    tensors = list(_tensors(0).items())
    stream = {"order": tensors[::-1], "short": tensors[:-1]}[kind]
    try:
        send(None, _plans(1)[0], iter(stream), with_digests=False)
    except WeightSyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["order", "short"])
def test_a_stream_that_leaves_its_plan_is_refused(kind: str) -> None:
    """If it fails, tensors land under other names, which a shape check would not see."""
    assert "expected " in _wrong_stream(0, 1, kind)


def _join_alone(rank: int, world_size: int, port: int) -> str:
    from gkd.errors import WeightSyncError
    from gkd.weight_sync.transfer import GroupSpec, TransferGroup

    try:
        TransferGroup(GroupSpec("gloo", "127.0.0.1", port, 1, 2, 2.0), torch.device("cpu"))
    except WeightSyncError as error:
        return str(error)
    return ""


def test_a_member_that_never_comes_is_an_error_in_time() -> None:
    """If it fails, the first sync hangs without a word about which rank waits where."""
    port = free_port()
    (message,) = run_gloo(_join_alone, 1, port)
    assert f"rank 1 of 2 could not join the weight-sync group at 127.0.0.1:{port}" in message
