"""A checkpoint of a different student is refused; the error names the first difference."""

from __future__ import annotations

from typing import Any

import pytest

from gkd.actor.common.shards import check_same_student, check_trained
from gkd.errors import CheckpointError

OWN: dict[str, Any] = {"strategy": "fsdp2", "dtype": "bfloat16", "shapes": {"a": [2, 3], "b": [4]}, "world_size": 2}
SAVED = OWN | {"step": 7, "world_size": 4}


def _check(saved: dict[str, Any]) -> None:
    check_same_student("ckpt", saved, OWN, settings=("strategy", "dtype"), model="shapes")


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"strategy": "megatron"}, "strategy = megatron.* fsdp2"),
        ({"dtype": "float32"}, "dtype = float32.* bfloat16"),
        ({"shapes": {"a": [2, 3], "b": [5]}}, r"b = \[5\].* \[4\]"),
        ({"shapes": {"a": [2, 3]}}, "the checkpoint does not train b"),
        ({"shapes": {"a": [2, 3], "b": [4], "c": [1]}}, "this student does not train c"),
    ],
)
def test_a_different_student_is_refused(change: dict[str, Any], difference: str) -> None:
    """Fails if a checkpoint of a different student passes, or one of another number of ranks is refused."""
    _check(SAVED)
    with pytest.raises(CheckpointError, match=f"ckpt .*{difference}"):
        _check(SAVED | change)


@pytest.mark.parametrize(
    ("saved", "own", "named"),
    [
        ({"base": "x", "shapes": {"a": [1]}}, {}, "actor.lora.rank"),
        ({}, {"base": "x", "shapes": {"a": [1]}}, "actor.lora.rank"),
        ({"base": "x", "shapes": {"a": [1]}}, {"base": "y", "shapes": {"a": [1]}}, "model.path"),
        ({"base": "x", "shapes": {"a": [1]}}, {"base": "x", "shapes": {"b": [1]}}, "does not train a"),
    ],
)
def test_other_adapters_are_refused(saved: dict[str, Any], own: dict[str, Any], named: str) -> None:
    """Fails if adapters are resumed with other base weights, as all weights, or for other layers."""
    check_trained("ckpt", saved, saved)
    with pytest.raises(CheckpointError, match=named):
        check_trained("ckpt", saved, own)


def test_incomplete_meta_data_are_refused() -> None:
    """Fails if meta data of another origin raise a KeyError."""
    with pytest.raises(CheckpointError):
        _check({key: value for key, value in SAVED.items() if key not in ("dtype", "step")})
