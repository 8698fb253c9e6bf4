"""The engine without a model: properties that load and chaos tests rely on when they recompute a reply."""

from __future__ import annotations

import numpy as np
import pytest

from teacher_server.engines.base import ScoreParams, TokenSequence, stream_rows
from teacher_server.wire.table import NO_ID, TopKTable
from tests.service.trivial_engine import (
    HIDDEN_SIZE,
    TrivialEngine,
    trivial_head,
    trivial_hidden,
    trivial_logits,
    trivial_sampled,
    trivial_topk,
)

VOCAB = 1009
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 60).astype(np.int32)
ENGINE = TrivialEngine(vocab_size=VOCAB, max_tokens=100)


def test_its_topk_is_a_distribution() -> None:
    """Fails if the client's checks would refuse it: ids distinct, logprobs descending, probabilities with sum 1."""
    for k, n_vocab in ((1, VOCAB), (8, VOCAB), (64, 70), (70, 70)):
        scored = trivial_topk(TOKENS, 20, k, n_vocab)
        assert scored.ids.shape == scored.logprobs.shape == (40, k)
        assert scored.ids.min() >= 0 and scored.ids.max() < n_vocab
        assert all(len(set(row)) == k for row in scored.ids)
        assert (np.diff(scored.logprobs, axis=1) < 0).all()
        np.testing.assert_allclose(np.exp(scored.logprobs).sum(-1) + scored.tail, 1, atol=1e-5)
        assert scored.tail.min() > 0 and scored.tail.max() < 1


def test_a_row_depends_on_every_token_before_it_and_on_none_after() -> None:
    """Fails if a reply for other tokens can equal the right one."""
    whole = trivial_topk(TOKENS, 20, 8, VOCAB)
    for position in range(60):
        changed = TOKENS.copy()
        changed[position] = (changed[position] + 1) % VOCAB
        differs = (trivial_topk(changed, 20, 8, VOCAB).tail != whole.tail) | (
            trivial_topk(changed, 20, 8, VOCAB).ids != whole.ids
        ).any(-1)
        first = max(0, position - 19)  # row j depends on tokens 0 .. 19 + j
        assert differs[first:].all() and not differs[:first].any()
    swapped = TOKENS.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert (trivial_topk(swapped, 20, 8, VOCAB).ids != whole.ids).any()


def test_the_engine_returns_the_values_of_the_functions() -> None:
    """Fails if the functions that tests compare with differ from the engine."""
    sequence = TokenSequence(TOKENS, 20)
    scored = ENGINE.score([sequence], ScoreParams("topk", k=8, n_vocab=500))[0]
    np.testing.assert_array_equal(scored.ids, trivial_topk(TOKENS, 20, 8, 500).ids)  # type: ignore[union-attr]
    sampled = ENGINE.score([sequence], ScoreParams("sampled"))[0]
    np.testing.assert_array_equal(sampled, trivial_sampled(TOKENS, 20))
    assert sampled.max() <= 0 and len(set(sampled.tolist())) > 35  # type: ignore[union-attr]
    for wire in ("fp32", "fp16"):
        for signal, expected in (
            ("logits", trivial_logits(TOKENS, 20, VOCAB)),
            ("hidden", trivial_hidden(TOKENS, 20)),
        ):
            stream = ENGINE.score([sequence], ScoreParams(signal, wire=wire))[0]  # type: ignore[arg-type]
            rows = [rows for _, _, rows in stream_rows(stream, 7)]  # type: ignore[arg-type]
            np.testing.assert_array_equal(np.concatenate(rows), expected)
        head = [rows for _, _, rows in stream_rows(ENGINE.lm_head(wire), 100)]
        np.testing.assert_array_equal(np.concatenate(head), trivial_head(VOCAB))
    assert trivial_head(VOCAB).shape == (VOCAB, HIDDEN_SIZE)


def test_its_mass_target_shortens_rows() -> None:
    """Fails if no row is shortened by a mass target, or the tail omits the dropped entries."""
    scored = ENGINE.score([TokenSequence(TOKENS, 20)], ScoreParams("topk", k=16, mass=0.6))[0]
    assert isinstance(scored, TopKTable) and scored.counts is not None
    counts = scored.counts
    assert 1 <= counts.min() < counts.max() <= 16
    mass = np.exp(scored.logprobs.astype(np.float64)).sum(-1)
    np.testing.assert_allclose(mass + scored.tail, 1, atol=1e-5)
    assert (mass[counts < 16] >= 0.6 - 1e-6).all()
    assert ((scored.ids == NO_ID).sum(-1) == 16 - counts).all()


@pytest.mark.parametrize("n_tokens", [2, 100])
def test_the_shortest_and_a_long_sequence(n_tokens: int) -> None:
    """Fails if a sequence of one prompt and one response token has no row."""
    tokens = np.arange(n_tokens, dtype=np.int32)
    assert len(trivial_topk(tokens, n_tokens - 1, 4, VOCAB).ids) == 1
