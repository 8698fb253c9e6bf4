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
    """Send on the first ranks, one for each group, and receive on the others. Return the digests by tensor."""
    from gkd.weight_sync.buckets import digest
    from gkd.weight_sync.transfer import GroupSpec, TransferGroup, receive, send

    n_senders = len(ports)
    n_members = 1 + world_size - n_senders
    digests: dict[str, str] = {}

    def join(port: int, member: int) -> TransferGroup:
        return TransferGroup(GroupSpec("gloo", "127.0.0.1", port, member, n_members, 30.0, 30.0), torch.device("cpu"))

    plans = _plans(n_senders)
    if rank < n_senders:
        group = join(ports[rank], 0)
        for _ in range(2):  # a group serves many syncs
            digests |= send(group, plans[rank], iter(_tensors(rank).items()), with_digests=True)
    else:
        groups = [join(port, 1 + rank - n_senders) for port in ports]
        for _ in range(2):
            for group, buckets in zip(groups, plans, strict=True):
                receive(group, buckets, lambda tensors: digests.update({n: digest(t) for n, t in tensors}))
    return digests


@pytest.mark.parametrize(("n_senders", "n_receivers"), [(1, 2), (2, 1)])
def test_every_receiver_has_the_senders_weights(n_senders: int, n_receivers: int) -> None:
    """Fails if an engine samples from other weights than the actor's."""
    ranks = run_gloo(_exchange, n_senders + n_receivers, [free_port() for _ in range(n_senders)])
    sent = {name: value for part in ranks[:n_senders] for name, value in part.items()}
    assert len(sent) == n_senders * len(SHAPES)
    assert all(part == sent for part in ranks[n_senders:])


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
def test_tensors_that_differ_from_the_plan_are_refused(kind: str) -> None:
    """Fails if tensors are received under wrong names, which a shape check would not detect."""
    assert _wrong_stream(0, 1, kind)


def _join_alone(rank: int, world_size: int, port: int) -> str:
    from gkd.errors import WeightSyncError
    from gkd.weight_sync.transfer import GroupSpec, TransferGroup

    try:
        TransferGroup(GroupSpec("gloo", "127.0.0.1", port, 1, 2, 2.0, 2.0), torch.device("cpu"))
    except WeightSyncError as error:
        return str(error)
    return ""


def test_a_missing_member_is_a_timeout() -> None:
    """Fails if the first sync hangs, or the error lacks the rank or the address."""
    port = free_port()
    (message,) = run_gloo(_join_alone, 1, port)
    assert "rank 1 of 2" in message and f"127.0.0.1:{port}" in message
