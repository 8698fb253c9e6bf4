"""The engine without a model: properties that load and chaos tests rely on when they recompute a reply."""

from __future__ import annotations

import numpy as np

from teacher_server.engines.base import ScoreParams, TokenSequence
from teacher_server.wire.table import NO_ID, TopKTable
from tests.service.trivial_engine import TrivialEngine, trivial_topk

VOCAB = 1009
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 60).astype(np.int32)
ENGINE = TrivialEngine(vocab_size=VOCAB, max_tokens=100)


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
