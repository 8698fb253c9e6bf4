"""A checkpoint of a different student is refused; the error names the first difference."""

from __future__ import annotations

from typing import Any

import pytest

from gkd.actor.common.same_student import check_same_student
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
        ({"shapes": {"a": [2, 3]}}, r"b = .* \[4\]"),
        ({"shapes": {"a": [2, 3], "b": [4], "c": [1]}}, r"c = \[1\]"),
    ],
)
def test_a_different_student_is_refused(change: dict[str, Any], difference: str) -> None:
    """Fails if a checkpoint of a different student passes, or one of another number of ranks is refused."""
    _check(SAVED)
    with pytest.raises(CheckpointError, match=f"ckpt .*{difference}"):
        _check(SAVED | change)


def test_incomplete_meta_data_are_refused() -> None:
    """Fails if meta data of another origin raise a KeyError."""
    with pytest.raises(CheckpointError, match="dtype, step"):
        _check({key: value for key, value in SAVED.items() if key not in ("dtype", "step")})
