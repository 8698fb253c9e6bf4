"""Checks of packed micro-batches before a forward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gkd.actor.common.step import check_micro_batch
from gkd.errors import DataError
from gkd.types import MicroBatch
from tests.dist.megatron_reference import make_micro_batches, pack


def _pack() -> MicroBatch:
    """Return a pack of three sequences of 13, 12 and 11 tokens."""
    batch = pack(make_micro_batches(0)[2])
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 13, 25, 36]
    return batch


def test_a_valid_pack_passes() -> None:
    """Fails if valid packs are refused, which would make the test below meaningless."""
    check_micro_batch(_pack(), needs_scores=True)


def _cu_seqlens(*borders: int) -> Callable[[MicroBatch], None]:
    def change(batch: MicroBatch) -> None:
        batch.cu_seqlens = torch.tensor(borders, dtype=torch.int32)

    return change


def _two_rows(batch: MicroBatch) -> None:
    batch.tokens = batch.tokens.view(2, -1)
    batch.position_ids = batch.position_ids.view(2, -1)


def _int64_cu_seqlens(batch: MicroBatch) -> None:
    assert batch.cu_seqlens is not None
    batch.cu_seqlens = batch.cu_seqlens.long()


def _continued_positions(batch: MicroBatch) -> None:
    batch.position_ids = torch.arange(36)[None]


def _no_cu_seqlens(batch: MicroBatch) -> None:
    batch.cu_seqlens = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_cu_seqlens(0, 13, 25, 35), "36 tokens"),
        (_cu_seqlens(1, 13, 25, 36), "36 tokens"),
        (_cu_seqlens(0, 13, 13, 36), "ascend"),
        (_cu_seqlens(0, 25, 13, 36), "ascend"),
        (_cu_seqlens(0), "ascend"),
        (_cu_seqlens(), "ascend"),
        (_cu_seqlens(0, 12, 25, 36), "position_ids"),
        (_continued_positions, "position_ids"),
        (_two_rows, "cu_seqlens"),
        (_int64_cu_seqlens, "int32"),
        (_no_cu_seqlens, "without cu_seqlens"),
    ],
)
def test_an_invalid_pack_is_refused(change: Callable[[MicroBatch], None], message: str) -> None:
    """Fails if sequences could attend to each other, or tokens get other positions than in the rollout."""
    batch = _pack()
    change(batch)
    with pytest.raises(DataError, match=message):
        check_micro_batch(batch, needs_scores=True)
