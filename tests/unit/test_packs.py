"""What a student says of packs that it would train on wrongly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gkd.actor.common.step import check_micro_batch
from gkd.errors import DataError
from gkd.types import MicroBatch
from tests.dist.megatron_reference import make_micro_batches, pack


def _pack() -> MicroBatch:
    """Three sequences of 13, 12 and 11 tokens."""
    batch = pack(make_micro_batches(0)[2])
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 13, 25, 36]
    return batch


def test_a_pack_passes() -> None:
    """Fails if well-formed packs are refused, and the test below proves nothing."""
    check_micro_batch(_pack(), needs_scores=True)


def _borders(*borders: int) -> Callable[[MicroBatch], None]:
    def change(batch: MicroBatch) -> None:
        batch.cu_seqlens = torch.tensor(borders, dtype=torch.int32)

    return change


def _two_rows(batch: MicroBatch) -> None:
    batch.tokens = batch.tokens.view(2, -1)
    batch.position_ids = batch.position_ids.view(2, -1)


def _wide_borders(batch: MicroBatch) -> None:
    assert batch.cu_seqlens is not None
    batch.cu_seqlens = batch.cu_seqlens.long()


def _positions_go_on(batch: MicroBatch) -> None:
    batch.position_ids = torch.arange(36)[None]


def _borders_forgotten(batch: MicroBatch) -> None:
    batch.cu_seqlens = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_borders(0, 13, 25, 35), "from 0 to the 36 tokens"),
        (_borders(1, 13, 25, 36), "from 0 to the 36 tokens"),
        (_borders(0, 13, 13, 36), "does not ascend"),
        (_borders(0, 25, 13, 36), "does not ascend"),
        (_borders(0), "does not ascend"),
        (_borders(), "does not ascend"),
        (_borders(0, 12, 25, 36), "position_ids"),
        (_positions_go_on, "position_ids"),
        (_two_rows, "cu_seqlens"),
        (_wide_borders, "int32"),
        (_borders_forgotten, "without cu_seqlens"),
    ],
)
def test_a_wrong_pack_is_refused(change: Callable[[MicroBatch], None], message: str) -> None:
    """Fails if sequences would attend to each other, or tokens get positions that they never had in the rollout."""
    batch = _pack()
    change(batch)
    with pytest.raises(DataError, match=message):
        check_micro_batch(batch, needs_scores=True)
