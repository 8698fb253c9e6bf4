"""Scores that no teacher can mean are refused, with the sequence's name."""

from __future__ import annotations

import numpy as np
import pytest

from gkd.errors import TeacherError
from gkd.teacher.base import validate_topk
from gkd.types import TeacherTopK


def good() -> TeacherTopK:
    probabilities = np.array([[0.5, 0.25, 0.125], [0.9, 0.05, 0.05]])
    return TeacherTopK(np.array([[4, 0, 9], [1, 2, 3]], np.int32), np.log(probabilities).astype(np.float32))


def test_good_scores_pass() -> None:
    """Would break if ties, or a mass of 1 within float16, were refused."""
    validate_topk(good(), 10, "x", n_rows=2)
    rounded = TeacherTopK(np.array([[0, 1]], np.int32), np.log([[0.5, 0.5]]).astype(np.float16).astype(np.float32))
    validate_topk(rounded, 2, "x")


@pytest.mark.parametrize(
    "ids,logprobs,words",
    [
        ({(1, 0): 10}, {}, r"outside \[0, 10\)"),
        ({(1, 0): -1}, {}, "outside"),
        ({(1, 0): 3}, {}, "twice"),
        ({}, {(1, 2): np.nan}, "NaN"),
        ({}, {(1, 2): -np.inf}, "infinite"),
        ({}, {(1, 0): -0.04}, "mass"),
        ({}, {(1, 0): 500.0}, "mass"),
        ({}, {(1, 0): -5.0}, "descend"),
    ],
)
def test_bad_values(ids: dict[tuple[int, int], int], logprobs: dict[tuple[int, int], float], words: str) -> None:
    """Would break if the loss could be taken over such a row; each changes one entry of good scores."""
    scores = good()
    for at, token in ids.items():
        scores.topk_ids[at] = token
    for at, value in logprobs.items():
        scores.topk_logprobs[at] = value
    with pytest.raises(TeacherError, match=f"prompt 3, sample 1: response position 1 .*{words}"):
        validate_topk(scores, 10, "prompt 3, sample 1")


def test_bad_shapes() -> None:
    """Would break if rows of another sequence, or none, were accepted."""
    ids, logprobs = good().topk_ids, good().topk_logprobs
    for scores in (
        TeacherTopK(ids[:1], logprobs),
        TeacherTopK(ids[:0], logprobs[:0]),
        TeacherTopK(ids[0], logprobs[0]),
    ):
        with pytest.raises(TeacherError, match="expected"):
            validate_topk(scores, 10, "x")
    with pytest.raises(TeacherError, match=r"\[3, K\]"):
        validate_topk(good(), 10, "x", n_rows=3)
    with pytest.raises(TeacherError, match="float64"):
        validate_topk(TeacherTopK(ids, logprobs.astype(np.float64)), 10, "x")
