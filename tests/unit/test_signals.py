"""Signals from hidden states with synthetic heads: edge cases that cannot be produced with a model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from teacher_server.engines import signals
from teacher_server.engines.base import ScoreParams, TokenSequence, stream_rows
from teacher_server.engines.signals import (
    BLOCK,
    MIN_SHRINK,
    LogitsStream,
    MatrixStream,
    score_hidden,
    topk,
    topk_two_stage,
)


def given(logits: torch.Tensor) -> signals.LogitsOf:
    """Return a head for hidden states [N, 1] that contain row numbers: it looks up the logits."""
    return lambda hidden: logits[hidden[:, 0].long()].clone()


def numbered(n: int) -> torch.Tensor:
    return torch.arange(float(n))[:, None]


def score(logits: torch.Tensor, params: ScoreParams, lengths: list[int] | None = None) -> list[Any]:
    batch = [TokenSequence(np.zeros(n + 1, np.int32), 1) for n in lengths or [len(logits)]]
    return score_hidden(numbered(len(logits)), batch, given(logits), params, logits.shape[1])


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize(("n_cols", "k"), [(64, 1), (65, 1), (640, 9), (700, 10), (705, 10), (1000, 15), (127, 1)])
def test_two_stages_equal_torch_topk(n_cols: int, k: int, block: int) -> None:
    """Fails if a block with one of the k largest numbers is omitted, or the columns after the last whole block."""
    generator = torch.Generator().manual_seed(n_cols)
    for rows in (
        torch.randn(20, n_cols, generator=generator),
        torch.randint(0, 4, (20, n_cols), generator=generator).float(),  # ties everywhere
        torch.arange(n_cols).float().expand(2, -1),  # all of them in the last columns
        torch.full((2, n_cols), -math.inf).index_fill_(1, torch.tensor([n_cols - 1]), 1.0),
    ):
        values, columns = topk_two_stage(rows, k, block)
        torch.testing.assert_close(values, rows.topk(k).values, rtol=0, atol=0)
        torch.testing.assert_close(rows.gather(1, columns), values, rtol=0, atol=0)
        assert all(len(set(row.tolist())) == k for row in columns)


def test_two_stages_are_used_only_if_they_reduce_the_columns() -> None:
    """Fails if a large k or a small vocabulary uses two stages, or has too few blocks for them."""
    for n_cols, k in ((5, 5), (BLOCK * MIN_SHRINK * 3, 3), (BLOCK * MIN_SHRINK * 3 - 1, 3), (300, 300)):
        rows = torch.randn(4, n_cols, generator=torch.Generator().manual_seed(k))
        torch.testing.assert_close(topk(rows, k), tuple(rows.topk(k)), rtol=0, atol=0)


def test_a_nan_in_any_column_is_detected() -> None:
    """Fails if a NaN outside the k largest, or in another chunk, becomes a score."""
    for column in (0, 2_000, 4_999):
        for bad in (math.nan, math.inf):
            logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
            logits[2, column] = bad
            for params in (ScoreParams("topk", k=2), ScoreParams("sampled")):
                with pytest.raises(ArithmeticError):
                    score(logits, params)
            with pytest.raises(ArithmeticError):
                score(logits, ScoreParams("logits"))[0].rows(0, 3)


def test_every_chunk_runs_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if one tensor-parallel rank leaves the loop while the others wait in a collective of the LM head."""
    monkeypatch.setitem(signals.CHUNK_BYTES, "cpu", 1)
    logits = torch.full((4, 9), math.nan)
    calls = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden))
        return given(logits)(hidden)

    with pytest.raises(ArithmeticError):
        score_hidden(numbered(4), [TokenSequence(np.zeros(5, np.int32), 1)], head, ScoreParams("topk", k=2), 9)
    assert calls == [1, 1, 1, 1]


def test_a_tiny_tail_is_not_rounded_away() -> None:
    """Fails if the tail is computed as 1 - mass, which has an absolute error of 1e-7 in float32."""
    logits = torch.tensor([[0.0, -30.0, -31.0, -32.0], [5.0, 5.0, -60.0, -61.0]])
    exact = logits.double().softmax(-1)
    scored = score(logits, ScoreParams("topk", k=2))[0]
    np.testing.assert_allclose(scored.tail, exact[:, 2:].sum(-1).float().numpy(), rtol=1e-5)
    assert (scored.logprobs <= 0).all()


def test_extreme_temperatures() -> None:
    """Fails if exp overflows, or if dividing before subtracting the maximum loses precision."""
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 3 + 1000
    for temperature in (1e-4, 1e4):
        expected = (logits.double() / temperature).log_softmax(-1)
        scored = score(logits, ScoreParams("topk", k=3, temperature=temperature))[0]
        own = expected.gather(1, torch.from_numpy(scored.ids).long())
        np.testing.assert_allclose(scored.logprobs, own.numpy(), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(
    ("mass", "counts"), [(0.4, [1, 2]), (0.5, [1, 2]), (0.51, [2, 3]), (0.75, [2, 3]), (1.0, [4, 4])]
)
def test_the_mass_target_is_the_smallest_count_that_reaches_it(mass: float, counts: list[int]) -> None:
    """Fails at a boundary: a target that is reached exactly needs no further entry; one beyond K ends at K."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625], [0.25, 0.25, 0.25, 0.125, 0.125]]).log()
    scored = score(logits, ScoreParams("topk", k=4, mass=mass))[0]
    assert scored.counts.tolist() == counts
    kept = np.exp(scored.logprobs.astype(np.float64)).sum(-1)  # exp(-inf) = 0
    np.testing.assert_allclose(scored.tail, 1 - kept, atol=1e-6)


def test_each_sequence_gets_its_own_rows() -> None:
    """Fails if a sequence of a batch gets rows of another one."""
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))
    for params in (ScoreParams("topk", k=3), ScoreParams("topk", k=3, mass=0.5)):
        whole = score(logits, params)[0]
        parts = score(logits, params, [1, 4, 2])
        for name in ("ids", "logprobs", "tail", "counts"):
            if getattr(whole, name) is not None:
                np.testing.assert_array_equal(
                    np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name)
                )
    streams = score(logits, ScoreParams("logits"), [1, 4, 2])
    rows = np.concatenate([rows for stream in streams for _, _, rows in stream_rows(stream, 3)])
    np.testing.assert_array_equal(rows, (logits - logits.amax(-1, keepdim=True)).numpy())
    with pytest.raises(ValueError):
        score(logits, ScoreParams("sampled"), [1, 5])


def test_bfloat16_rows_are_bit_exact() -> None:
    """Fails if rows of a bfloat16 engine are converted: float16 overflows, float32 doubles the bytes."""
    matrix = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).mul_(1e6).bfloat16()
    for wire in ("fp16", "fp32"):
        stream = MatrixStream(matrix, wire)
        rows = stream.rows(1, 4)
        assert (stream.dtype, rows.dtype) == ("bfloat16", np.uint16)
        np.testing.assert_array_equal((rows.astype(np.uint32) << 16).view(np.float32), matrix[1:4].float().numpy())
    assert MatrixStream(matrix.half().float(), "fp32").dtype == "float32"


def test_numbers_outside_the_float16_range() -> None:
    """Fails if a hidden state above 65504, or a very small logit, becomes an infinity."""
    with pytest.raises(ArithmeticError):
        MatrixStream(torch.tensor([[1.0, -70000.0]]), "fp16").rows(0, 1)
    with pytest.raises(ArithmeticError):
        MatrixStream(torch.tensor([[1.0, math.nan]]), "fp32").rows(0, 1)
    stream = LogitsStream(numbered(1), given(torch.tensor([[9.0, 0.0, 8.0]])), 1e-4, 3, "fp16")
    assert stream.rows(0, 1).tolist() == [[0.0, -65504.0, np.float16(-10000.0)]]


def test_a_closed_stream_releases_its_memory() -> None:
    """Fails if a closed stream keeps its hidden states."""
    for stream in (
        MatrixStream(numbered(3), "fp32"),
        LogitsStream(numbered(3), given(torch.ones(3, 4)), 1.0, 4, "fp32"),
    ):
        stream.close()
        stream.close()
        with pytest.raises(RuntimeError):
            stream.rows(0, 1)
