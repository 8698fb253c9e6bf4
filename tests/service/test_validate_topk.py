"""Invalid scores are refused with an error that names the sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.data.score_checks import check_top_ids, validate_scores
from gkd.errors import TeacherError
from gkd.types import Rollout, TeacherScores, VersionSpan
from teacher_server.wire.protocol import Signal
from teacher_server.wire.table import Rows, TopKTable, check_topk


def check(scores: TopKTable, n_vocab: int = 10, where: str = "x", n_rows: int | None = None) -> None:
    check_topk(scores, n_vocab, Rows((where,), (len(scores.ids) if n_rows is None else n_rows,)))


def good() -> TopKTable:
    probabilities = np.array([[0.5, 0.25, 0.125], [0.9, 0.05, 0.05]])
    logprobs = np.log(probabilities).astype(np.float32)
    tail = np.array([0.125, 0.0], np.float32)
    return TopKTable(np.array([[4, 0, 9], [1, 2, 3]], np.int32), logprobs, tail)


def counted() -> TopKTable:
    """Return scores in which row 0 lists all three ids and row 1 two."""
    scores = good()
    ids, logprobs, tail = scores.ids[::-1].copy(), scores.logprobs[::-1].copy(), scores.tail[::-1].copy()
    ids[1, 2], logprobs[1, 2], tail[1] = -1, -np.inf, 0.25
    return TopKTable(ids, logprobs, tail, np.array([3, 2], np.int32))


def test_good_scores_pass() -> None:
    """Fails if ties, a mass of 1 within float16 rounding, or a row shortened by a mass target is refused."""
    check(good())
    check(counted())
    rounded = np.log([[0.5, 0.5]]).astype(np.float16).astype(np.float32)
    check(TopKTable(np.array([[0, 1]], np.int32), rounded, np.zeros(1, np.float32)), 2)


@settings(max_examples=60)
@given(st.integers(1, 4000), st.floats(0.0, 20.0), st.integers(0, 1 << 30))
def test_valid_scores_rounded_to_float16_pass(k: int, spread: float, seed: int) -> None:
    """Fails if the accumulated rounding of many equal logprobs is refused."""
    logits = np.random.default_rng(seed).normal(size=k + 7) * spread
    logprobs = -np.sort(-(logits - np.logaddexp.reduce(logits)))
    tail = np.array([np.exp(logprobs[k:]).sum()], np.float32)
    wire = logprobs[None, :k].astype(np.float16).astype(np.float32)
    check(TopKTable(np.arange(k, dtype=np.int32)[None], wire, tail), k + 7)


@pytest.mark.parametrize(
    "counts,ids,logprobs,tail,expected",
    [
        (None, {(1, 0): 10}, {}, None, r"\[0, 10\)"),
        (None, {(1, 0): -1}, {}, None, r"\[0, 10\)"),
        (None, {(1, 0): 3}, {}, None, ""),
        (None, {}, {(1, 2): np.nan}, None, ""),
        (None, {}, {(1, 2): -np.inf}, None, ""),
        (None, {}, {(1, 0): -0.04}, None, r"1\.06079"),
        (None, {}, {(1, 0): 500.0}, None, "inf"),
        (None, {}, {(1, 0): np.log(0.05), (1, 1): np.log(0.9)}, None, ""),
        (None, {}, {}, np.nan, r"\[0, 1\]"),
        (None, {}, {}, -0.01, r"\[0, 1\]"),
        (None, {}, {}, 1.01, r"\[0, 1\]"),
        (None, {}, {}, 0.01, r"1\.01"),
        (None, {}, {(1, 1): -4.0, (1, 2): -5.0}, None, r"0\.925"),
        ([3, 0], {}, {}, None, "1 to 3"),
        ([3, 4], {}, {}, None, "1 to 3"),
        ([3, 1], {}, {}, None, r"\(-1, -inf\)"),
        ([3, 3], {}, {}, None, ""),
        ([3, 2], {(1, 2): 5}, {}, None, r"\(-1, -inf\)"),
        ([3, 2], {}, {(1, 2): -9.0}, None, r"\(-1, -inf\)"),
        ([3, 2], {}, {(1, 2): np.nan}, None, r"\(-1, -inf\)"),
        ([3, 2], {(1, 1): 4}, {}, None, ""),
        ([3, 2], {(1, 1): 10}, {}, None, r"\[0, 10\)"),
        ([3, 2], {(1, 1): -1}, {}, None, r"\[0, 10\)"),
        ([3, 2], {}, {(1, 0): np.log(0.25), (1, 1): np.log(0.5)}, None, ""),
        ([3, 2], {}, {(1, 1): np.nan}, None, ""),
        ([3, 2], {}, {(1, 0): -0.2}, None, r"1\.06873"),
    ],
)
def test_bad_values(
    counts: list[int] | None,
    ids: dict[tuple[int, int], int],
    logprobs: dict[tuple[int, int], float],
    tail: float | None,
    expected: str,
) -> None:
    """Fails if such a row can reach the loss, or padding of a short row be used as scores. Each case changes one value
    of valid scores.
    """
    scores = good() if counts is None else counted()
    for at, token in ids.items():
        scores.ids[at] = token
    for at, value in logprobs.items():
        scores.logprobs[at] = value
    if tail is not None:
        scores.tail[1] = tail
    bad = TopKTable(scores.ids, scores.logprobs, scores.tail, None if counts is None else np.array(counts, np.int32))
    with pytest.raises(TeacherError, match=f"prompt 3, sample 1: .* 1 .*{expected}"):
        check(bad, where="prompt 3, sample 1")


def test_bad_shapes() -> None:
    """Fails if rows of another sequence, or no rows, are accepted."""
    ids, logprobs, tail = good().ids, good().logprobs, good().tail
    for scores in (
        TopKTable(ids[:1], logprobs, tail),
        TopKTable(ids[:0], logprobs[:0], tail[:0]),
        TopKTable(ids[0], logprobs[0], tail),
        TopKTable(ids, logprobs, tail[:1]),
        TopKTable(ids, logprobs, tail, np.ones(3, np.int32)),
        TopKTable(ids, logprobs.astype(np.float64), tail),
        TopKTable(ids, logprobs, tail, np.full(2, 3.0)),
    ):
        with pytest.raises(TeacherError):
            check(scores)
    with pytest.raises(TeacherError):
        check(good(), n_rows=3)


def rollout() -> Rollout:
    """Return a rollout with two response tokens."""
    ids = np.array([4, 1], np.int32)
    return Rollout(3, 1, ids, ids, np.zeros(2, np.float32), (VersionSpan(0, 2, 0),), "stop")


def all_tables(logits_dtype: type[np.floating] = np.float32) -> TeacherScores:
    logits = np.array([[0.0, -1.0, -np.inf, -9.0] + [-2.0] * 6, [-0.0, -3.0, -4.0, -5.0] + [-60000.0] * 6])
    return TeacherScores(
        topk=good(),
        sampled_logprobs=np.array([-0.5, 0.0], np.float32),
        logits=logits.astype(logits_dtype),
        hidden=np.array([[3e38, 3e38, 3e38], [-1.0, 0.0, 1.0]], np.float32),
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_good_tables_pass(dtype: type[np.floating]) -> None:
    """Fails if a token with probability 0 or 1, or large finite numbers are refused."""
    validate_scores(all_tables(dtype), rollout(), 10, ("topk", "sampled", "logits", "hidden"), "x", 3)
    validate_scores(TeacherScores(hidden=all_tables().hidden), rollout(), 10, ("hidden",), "x")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    "signal,field,at,value",
    [
        *(("logits", "logits", (1, 2), value) for value in (np.nan, -np.nan, np.inf)),
        ("logits", "logits", 1, -np.inf),
        *(("sampled", "sampled_logprobs", 1, value) for value in (np.nan, -np.inf, 0.01)),
        *(("hidden", "hidden", 1, value) for value in (np.nan, -np.inf)),
    ],
)
def test_bad_rows(dtype: type[np.floating], signal: str, field: str, at: Any, value: float) -> None:
    """Fails if one invalid number of a table can reach the loss. float16 NaNs of both signs are found by their bits."""
    scores = all_tables(dtype)
    getattr(scores, field)[at] = value
    with pytest.raises(TeacherError, match=r"x: response position 1 \(1 rows\)"):
        validate_scores(scores, rollout(), 10, (signal,), "x")  # type: ignore[arg-type]


def test_tables_have_a_row_for_each_own_token() -> None:
    """Fails if a table of the whole response, or one of other rows, is taken for that of the own tokens."""
    signals: tuple[Signal, ...] = ("topk", "sampled", "logits", "hidden")
    two, four = rollout(), np.arange(4, dtype=np.int32)
    trajectory = replace(two, response_ids=four, own=np.array([False, True, False, True]), top_ids=np.zeros((2, 3)))
    validate_scores(all_tables(), trajectory, 10, signals, "x")
    check_top_ids(trajectory, 3, "x")
    for own in (None, np.arange(4) < 3):
        other = replace(trajectory, own=own)
        for signal in signals:
            with pytest.raises(TeacherError):
                validate_scores(all_tables(), other, 10, (signal,), "x")
        with pytest.raises(TeacherError):
            check_top_ids(other, 3, "x")


def test_bad_tables() -> None:
    """Fails if a table with other rows, of another vocabulary or model, or no table is accepted."""
    scores = all_tables()
    for signal in ("topk", "sampled", "logits", "hidden"):
        with pytest.raises(TeacherError, match=f"'{signal}'"):
            validate_scores(TeacherScores(), rollout(), 10, (signal,), "x")  # type: ignore[arg-type]
    for tables, n_vocab, signal, width in (
        (scores, 9, "logits", ()),
        (scores, 10, "hidden", (4,)),
        (replace(scores, hidden=scores.hidden[0]), 10, "hidden", ()),
        (replace(scores, logits=scores.logits.astype(float)), 10, "logits", ()),
    ):
        with pytest.raises(TeacherError):
            validate_scores(tables, rollout(), n_vocab, (signal,), "x", *width)
