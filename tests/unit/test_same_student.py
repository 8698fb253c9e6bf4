"""A checkpoint of another student is refused, with the first difference named."""

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
    ("change", "words"),
    [
        ({"strategy": "megatron"}, "strategy = megatron, this student has fsdp2"),
        ({"dtype": "float32"}, "dtype = float32, this student has bfloat16"),
        ({"shapes": {"a": [2, 3], "b": [5]}}, r"another model: b = \[5\], this student has \[4\]"),
        ({"shapes": {"a": [2, 3]}}, r"b = nothing, this student has \[4\]"),
        ({"shapes": {"a": [2, 3], "b": [4], "c": [1]}}, r"c = \[1\], this student has nothing"),
    ],
)
def test_another_student_is_refused(change: dict[str, Any], words: str) -> None:
    """Fails if a checkpoint of another student passes, or one that only had another number of ranks does not."""
    _check(SAVED)
    with pytest.raises(CheckpointError, match=f"ckpt .*{words}"):
        _check(SAVED | change)


def test_meta_data_that_lack_something_are_refused() -> None:
    """Fails if meta data of another origin end in a KeyError."""
    with pytest.raises(CheckpointError, match="does not say of its student: dtype, step"):
        _check({key: value for key, value in SAVED.items() if key not in ("dtype", "step")})
