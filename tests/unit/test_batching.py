"""Batching: which logits row learns from which teacher row. Off by one here trains the wrong thing silently."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.batching import make_micro_batches
from gkd.types import MicroBatch, Rollout, TeacherTopK, VersionSpan

K = 3


def make_rollout(prompt_id: int, n_prompt: int, n_response: int, sample: int = 0) -> Rollout:
    """Every token is unique to its place: prompt_id * 1000 + position."""
    tokens = np.arange(n_prompt + n_response, dtype=np.int32) + prompt_id * 1000
    return Rollout(
        prompt_id,
        sample,
        tokens[:n_prompt],
        tokens[n_prompt:],
        np.zeros(n_response, np.float32),
        (VersionSpan(0, n_response, 0),),
        "stop",
    )


def make_scores(rollout: Rollout) -> TeacherTopK:
    """Row j names the response token it belongs to: ids (token, token + 1, token + 2)."""
    ids = rollout.response_ids[:, None] + np.arange(K, dtype=np.int32)
    return TeacherTopK(ids, np.full(ids.shape, -2.0, np.float32), np.full(len(ids), 0.5, np.float32))


def rows_of(batch: MicroBatch) -> list[tuple[int, int, int]]:
    """(token at the row's position, token it must predict, first teacher id) of every loss row."""
    flat = batch.tokens.reshape(-1)
    return [
        (int(flat[i]), int(t), int(k[0]))
        for i, t, k in zip(batch.loss_index, batch.target_ids, batch.topk_ids, strict=True)
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7)), min_size=1, max_size=9),
    st.integers(1, 4),
    st.sampled_from([0, 13, 30]),
    st.randoms(use_true_random=False),
)
def test_every_response_token_is_learned_once_from_its_own_teacher_row(lengths, size, max_tokens, random) -> None:  # type: ignore[no-untyped-def]
    """If it fails, a token is trained twice, never, past the end of a response, or on another token's scores."""
    rollouts = [make_rollout(i + 1, p, r) for i, (p, r) in enumerate(lengths)]
    random.shuffle(rollouts)
    batches = make_micro_batches(
        rollouts, [make_scores(r) for r in rollouts], micro_batch_size=size, max_tokens=max_tokens, pad_id=0
    )
    got = sorted(row for batch in batches for row in rows_of(batch))
    expected = []
    for rollout in rollouts:
        tokens = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        n_prompt = len(rollout.prompt_ids)
        expected += [
            (int(tokens[n_prompt - 1 + j]), int(tokens[n_prompt + j]), int(tokens[n_prompt + j]))
            for j in range(len(rollout.response_ids))
        ]
    assert got == sorted(expected)
    for batch in batches:
        if max_tokens and batch.tokens.shape[0] > 1:
            assert batch.tokens.numel() <= max_tokens
        if not max_tokens:
            assert batch.tokens.shape[0] <= size


def test_the_batches_do_not_depend_on_the_order_of_arrival() -> None:
    """If it fails, a run cannot be repeated: rollouts arrive in another order each time."""
    rollouts = [make_rollout(1 + i // 2, 2, 1 + i % 3, sample=i) for i in range(10)]
    scores = [make_scores(r) for r in rollouts]
    for kwargs in ({"micro_batch_size": 3}, {"micro_batch_size": 1, "max_tokens": 12}):
        one = make_micro_batches(rollouts, scores, **kwargs)
        two = make_micro_batches(rollouts[::-1], scores[::-1], **kwargs)
        assert [b.tokens.tolist() for b in one] == [b.tokens.tolist() for b in two]
        assert [b.topk_ids.tolist() for b in one] == [b.topk_ids.tolist() for b in two]


def test_stages_without_a_loss_get_the_same_tokens_and_no_scores() -> None:
    """If it fails, pipeline stages disagree about shapes, or carry the teacher's scores for nothing."""
    rollouts = [make_rollout(1, 2, 3), make_rollout(2, 1, 4)]
    with_scores = make_micro_batches(rollouts, [make_scores(r) for r in rollouts], micro_batch_size=2)
    without = make_micro_batches(rollouts, None, micro_batch_size=2)
    assert with_scores[0].tokens.equal(without[0].tokens)
    assert with_scores[0].loss_index.equal(without[0].loss_index)
    assert without[0].topk_ids.shape == (7, 0)


@pytest.mark.parametrize("size", [1, 2])
def test_padding_is_behind_each_sequence(size: int) -> None:
    """If it fails, causal attention sees padding and the student is trained on it."""
    rollouts = [make_rollout(1, 2, 1), make_rollout(2, 3, 4)]
    for batch in make_micro_batches(rollouts, None, micro_batch_size=size, pad_id=0):
        for row in batch.tokens.tolist():
            real = [t for t in row if t != 0]
            assert row == real + [0] * (len(row) - len(real))
        assert batch.position_ids.tolist() == [list(range(batch.tokens.shape[1]))] * batch.tokens.shape[0]
