"""Micro-batches: alignment of loss rows and teacher rows, packing, checks of rollouts and scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.actor.common.step import check_micro_batch
from gkd.data.batching import check_batch, make_micro_batches, token_records, trained_on
from gkd.errors import DataError, GkdError, TeacherError
from gkd.types import SIGNAL_FIELDS, MicroBatch, Rollout, TeacherScores, VersionSpan
from teacher_server.wire.protocol import Signal
from teacher_server.wire.table import TopKTable
from tests.dist.megatron_reference import make_micro_batches as reference_batches
from tests.dist.student_cases import packed

K = 3
N_VOCAB, D = 10_000, 5
ALL = ("topk", "sampled", "logits", "hidden")


def make_rollout(prompt_id: int, n_prompt: int, n_response: int, sample: int = 0, *, own: int = 0) -> Rollout:
    """Return a rollout with unique tokens: prompt_id * 1000 + position.

    Args:
        own: the bits of the mask, the first token's is the lowest; 0 means no mask.
    """
    tokens = np.arange(n_prompt + n_response, dtype=np.int32) + prompt_id * 1000
    mask = np.array([own >> j & 1 for j in range(n_response)], bool)
    return Rollout(
        prompt_id,
        sample,
        tokens[:n_prompt],
        tokens[n_prompt:],
        np.zeros(mask.sum() or n_response, np.float32),
        (VersionSpan(0, n_response, 0),),
        "stop",
        own=mask if mask.any() else None,
    )


def make_scores(rollout: Rollout, k: int = K) -> TeacherScores:
    """Return scores whose row j identifies own token j in every table: ids token, token + 1, ..."""
    tokens = rollout.own_ids
    ids = tokens[:, None] + np.arange(k, dtype=np.int32)
    return TeacherScores(
        topk=TopKTable(ids, np.full(ids.shape, np.log(0.5 / k), np.float32), np.full(len(ids), 0.5, np.float32)),
        sampled_logprobs=-tokens.astype(np.float32),
        logits=np.repeat(-(tokens[:, None] % 1000).astype(np.float16), N_VOCAB, axis=1),
        hidden=np.repeat(tokens[:, None].astype(np.float32), D, axis=1),
    )


def rows_of(batch: MicroBatch) -> list[tuple[int, int, int]]:
    """Return (token at the row's position, token to predict, first teacher id) of every loss row."""
    flat, targets = batch.tokens.reshape(-1), batch.targets
    return [
        (int(flat[i]), int(t), int(k[0]))
        for i, t, k in zip(batch.loss_index, targets.sampled_ids, targets.topk_ids, strict=True)
    ]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(0, 127)), min_size=1, max_size=9),
    st.integers(1, 4),
    st.sampled_from([0, 13, 30]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_every_own_token_has_one_loss_row_with_its_teacher_row(  # type: ignore[no-untyped-def]
    lengths, size, max_tokens, packed, random
) -> None:
    """Fails if an own token has no loss row, several, or another token's scores, or an observed token has a row.

    Or if a long sequence shares its micro-batch, padding is in front of tokens, the order of arrival changes a batch,
    or a pipeline stage without a loss has other tokens, or holds scores.
    """
    rollouts = [make_rollout(i + 1, p, r, sample=i, own=own) for i, (p, r, own) in enumerate(lengths)]
    random.shuffle(rollouts)
    scores = [make_scores(r) for r in rollouts]
    batches = make_micro_batches(
        rollouts, scores, micro_batch_size=size, max_tokens=max_tokens, packed=packed, pad_id=0
    )
    found = sorted(row for batch in batches for row in rows_of(batch))
    expected = []
    for rollout in rollouts:
        tokens = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        n_prompt = len(rollout.prompt_ids)
        expected += [
            (int(tokens[n_prompt - 1 + j]), int(tokens[n_prompt + j]), int(tokens[n_prompt + j]))
            for j in range(len(rollout.response_ids))
            if rollout.own is None or rollout.own[j]
        ]
    assert found == sorted(expected)
    sizes = {r.sample_index: r.n_tokens for r in rollouts}
    for batch in batches:
        if max_tokens and len(batch.samples) > 1:
            assert batch.tokens.numel() <= max_tokens
        if not max_tokens:
            assert len(batch.samples) <= size
        if packed:
            check_packed(batch, [sizes[index] for index, _ in batch.samples])
        else:
            assert batch.cu_seqlens is None and batch.tokens.shape[0] == len(batch.samples)
            padded = torch.nn.utils.rnn.pad_sequence([row[row != 0] for row in batch.tokens], batch_first=True)
            assert batch.tokens.equal(padded) and (batch.position_ids == torch.arange(padded.shape[1])).all()
    assert sorted(batches.samples) == sorted((r.sample_index, r.n_own) for r in rollouts)
    assert list(batches.samples) == [pair for batch in batches for pair in batch.samples]
    other = make_micro_batches(rollouts, scores, micro_batch_size=size, max_tokens=max_tokens, packed=not packed)
    assert sorted(row for batch in other for row in rows_of(batch)) == found
    stage = make_micro_batches(
        rollouts[::-1], None, micro_batch_size=size, max_tokens=max_tokens, packed=packed, pad_id=0
    )
    for batch, same in zip(batches, stage, strict=True):
        assert batch.tokens.equal(same.tokens) and batch.loss_index.equal(same.loss_index) and same.targets is None


def check_packed(batch: MicroBatch, lengths: list[int]) -> None:
    """Assert one row without padding, positions that restart at each sequence, and loss rows inside the sequences."""
    assert batch.cu_seqlens.dtype == torch.int32
    borders = batch.cu_seqlens.tolist()
    assert borders == [0, *np.cumsum(lengths).tolist()] and batch.tokens.shape == (1, borders[-1])
    assert batch.position_ids.tolist() == [[i for n in lengths for i in range(n)]]
    assert batch.tokens.dtype == batch.position_ids.dtype == torch.int64 and batch.tokens.all()
    owner = np.searchsorted(borders, batch.loss_index.numpy(), side="right") - 1
    assert owner.tolist() == [i for i, (_, n_rows) in enumerate(batch.samples) for _ in range(n_rows)]


@settings(max_examples=60)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=40), st.integers(40, 90))
def test_packed_micro_batches_are_few(lengths: list[int], max_tokens: int) -> None:
    """Fails if packing leaves room into which a later sequence fits, which costs forward passes."""
    rollouts = [make_rollout(1, 1, n - 1, sample=i) for i, n in enumerate(lengths)]
    batches = make_micro_batches(rollouts, None, micro_batch_size=1, max_tokens=max_tokens, packed=True)
    used = [batch.tokens.numel() for batch in batches]
    smallest = [min(n_rows + 1 for _, n_rows in batch.samples) for batch in batches]
    for later in range(1, len(used)):
        assert all(room + smallest[later] > max_tokens for room in used[:later])
    fewest = max(-(-sum(lengths) // max_tokens), sum(2 * n > max_tokens for n in lengths))
    assert len(used) <= 2 * fewest


def test_micro_batches_are_built_on_access() -> None:
    """Fails if all teacher tables are copied at once, or a second access returns other values."""
    rollouts = [make_rollout(i, 2, 3, sample=i) for i in range(4)]
    scores = [make_scores(r) for r in rollouts]
    batches = make_micro_batches(rollouts, scores, micro_batch_size=2, packed=True)
    assert len(batches) == 2 and batches[-1].samples == ((2, 3), (3, 3)) and len(batches[1:]) == 1
    first, again = batches[0], batches[0]
    assert rows_of(first) == rows_of(again)
    assert first.targets.hidden.data_ptr() != again.targets.hidden.data_ptr()
    with pytest.raises(IndexError):
        batches[2]


@pytest.mark.parametrize("packed", [False, True])
def test_every_table_follows_its_response_token(packed: bool) -> None:
    """Fails if a loss row gets the teacher's values of another token."""
    rollouts = [make_rollout(1, 2, 3), replace(make_rollout(2, 1, 4), on_policy=False), make_rollout(3, 4, 1)]
    rollouts = [replace(r, rollout_logprobs=r.response_ids / np.float32(-1000)) for r in rollouts]
    (batch,) = make_micro_batches(rollouts, [make_scores(r) for r in rollouts], micro_batch_size=3, packed=packed)
    targets = batch.targets
    tokens = torch.cat([torch.from_numpy(r.response_ids) for r in rollouts])
    assert len(targets) == batch.n_loss_tokens == 8
    assert targets.sampled_ids.equal(tokens.long())
    assert targets.on_policy.tolist() == [True] * 3 + [False] * 4 + [True]
    torch.testing.assert_close(targets.rollout_logprobs, torch.where(targets.on_policy, tokens / -1000, 0.0))
    assert targets.ends.nonzero().flatten().tolist() == [2, 7]  # without the dataset's
    assert targets.topk_ids[:, 1].equal(tokens.long() + 1)
    assert targets.topk_logprobs.dtype == torch.float32
    assert targets.tail_mass.tolist() == [0.5] * 8
    assert targets.sampled_logprobs.equal(-tokens.float())
    assert targets.logits.dtype == torch.float16
    assert targets.logits.shape == (8, N_VOCAB) and targets.logits[:, -1].equal(-(tokens % 1000).half())
    assert targets.hidden.equal(tokens.float()[:, None].expand(8, D))


def test_each_turn_of_a_trajectory_has_an_end() -> None:
    """Fails if an end token before an observation counts as an ordinary one, or an observed token as an end."""
    done, cut = make_rollout(1, 2, 7, own=0b1100011), make_rollout(2, 1, 5, own=0b10011)
    rollouts = [done, replace(cut, finish_reason="length"), replace(make_rollout(3, 1, 3, own=0b011), on_policy=False)]
    (batch,) = make_micro_batches(rollouts, [make_scores(r) for r in rollouts], micro_batch_size=3)
    assert batch.targets.ends.tolist() == [False, True] * 2 + [False, True, False] + [False, False]


def test_skipped_tokens_are_own_tokens() -> None:
    """Fails if distill.skip_first_tokens counts observed tokens, or shifts the rows of a trajectory."""
    rollout = make_rollout(1, 2, 8, own=0b11000011)
    rollout = replace(rollout, rollout_logprobs=-np.arange(4, dtype=np.float32))
    for n, at in ((1, 1), (2, 6), (3, 7)):
        (rest,), (scores,) = cast("Any", trained_on([rollout], [make_scores(rollout)], n))
        assert rest.own_ids.tolist() == rollout.own_ids[n:].tolist() == scores.topk.ids[:, 0].tolist()
        assert len(rest.prompt_ids) == 2 + at and rest.n_tokens == rollout.n_tokens
        assert rest.rollout_logprobs.tolist() == rollout.rollout_logprobs[n:].tolist()
        check_batch([rest], None, where="rank", n_vocab=N_VOCAB, signals=())
    assert trained_on([rollout], None, 4) == ([], None)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_turns_keep_their_numbers_without_the_first_tokens(n: int, packed: bool) -> None:
    """Fails if a turn counts as an earlier one because distill.skip_first_tokens has left out all tokens before it."""
    rollouts = [make_rollout(1, 2, 9, own=0b110110011), make_rollout(2, 1, 7)]
    whole, cut = (
        make_micro_batches(kept, [make_scores(r) for r in kept], micro_batch_size=2, packed=packed)[0].targets
        for kept in (rollouts, trained_on(rollouts, None, n)[0])
    )
    assert whole.turns.tolist() == [0, 0, 1, 1, 2, 2, *[0] * 7]
    turn_of = dict(zip(whole.sampled_ids.tolist(), whole.turns.tolist(), strict=True))
    assert cut.turns.tolist() == [turn_of[token] for token in cut.sampled_ids.tolist()]


def test_tables_of_different_widths_are_padded_to_the_widest_of_their_micro_batch() -> None:
    """Fails if sequences with different K or a mass target cannot share a micro-batch, or padding counts as tokens."""
    rollouts = [make_rollout(1, 2, 2), make_rollout(2, 1, 1), make_rollout(3, 1, 3)]
    scores = [make_scores(r, k) for r, k in zip(rollouts, (2, 4, 3), strict=True)]
    wide, narrow = make_micro_batches(rollouts, scores, micro_batch_size=2)
    ids = wide.targets.topk_ids
    logprobs = wide.targets.topk_logprobs
    assert ids.shape == logprobs.shape == (3, 4)
    assert ids[:2, 2:].eq(-1).all() and logprobs[:2, 2:].eq(-torch.inf).all()
    assert ids[:2, :2].ge(0).all() and ids[2].ge(0).all() and logprobs[2].isfinite().all()
    assert narrow.targets.topk_ids.shape == (3, 3)


def test_read_only_arrays_of_the_object_store_are_copied() -> None:
    """Fails if torch writes to memory that other processes map."""
    rollout = make_rollout(1, 2, 3)
    scores = make_scores(rollout)
    scores.hidden.setflags(write=False)
    (batch,) = make_micro_batches([rollout], [scores], micro_batch_size=1)
    batch.targets.hidden.zero_()
    assert scores.hidden.any()


def test_a_table_of_only_some_sequences_is_refused() -> None:
    """Fails if rows of a table are assigned to sequences without it."""
    rollouts = [make_rollout(1, 2, 2), make_rollout(2, 1, 1)]
    scores = [make_scores(rollouts[0]), replace(make_scores(rollouts[1]), hidden=None)]
    with pytest.raises(DataError):
        make_micro_batches(rollouts, scores, micro_batch_size=2)


def check(rollouts: list[Rollout], scores: list[TeacherScores] | None, signals: tuple[str, ...] = ALL) -> None:
    check_batch(rollouts, scores, where="actor rank 3", n_vocab=N_VOCAB, signals=signals, hidden_size=D)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"response_ids": np.zeros(0, np.int32)}, "response"),
        ({"prompt_ids": np.zeros(0, np.int32)}, "prompt"),
        ({"response_ids": np.array([5, N_VOCAB], np.int32)}, "response position 1: .*10000"),
        ({"prompt_ids": np.array([-1, 5], np.int32)}, "prompt position 0: .*-1"),
        ({"rollout_logprobs": np.zeros(1, np.float32)}, r"rollout logprobs \[1\], expected \[2\]"),
        ({"rollout_logprobs": np.array([0, np.nan], np.float32)}, "position 1: .*nan"),
        ({"own": np.zeros(2, bool)}, "the mask marks 0 of 2 tokens"),
        ({"own": np.ones(3, bool)}, "the mask marks 3 of 3 tokens, the response has 2"),
        ({"own": np.array([False, True])}, r"rollout logprobs \[2\], expected \[1\]"),
    ],
)
def test_a_bad_rollout_is_refused_by_rank_and_sample(change: dict[str, np.ndarray], pattern: str) -> None:
    """Fails if an empty sequence, an invalid token or a NaN logprob is accepted, or the error does not name it."""
    valid = replace(make_rollout(6, 2, 2, sample=1), on_policy=False)
    bad = replace(make_rollout(7, 2, 2, sample=2), **change)  # type: ignore[arg-type]
    for scores in (None, [make_scores(valid), make_scores(valid)]):
        with pytest.raises(DataError, match=f"actor rank 3: prompt 7, sample 2: .*{pattern}"):
            check([valid, bad], scores)


def _topk(change: Callable[[TopKTable], None]) -> Callable[[TeacherScores], TeacherScores]:
    def changed(scores: TeacherScores) -> TeacherScores:
        change(scores.topk)
        return scores

    return changed


def _first_row(field: str) -> Callable[[TeacherScores], TeacherScores]:
    return lambda scores: replace(scores, **{field: getattr(scores, field)[:1]})


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (_topk(lambda t: t.logprobs.__setitem__((1, 0), np.nan)), "response position 1 .*NaN"),
        (_topk(lambda t: t.ids.__setitem__((1, 0), N_VOCAB)), r"response position 1 .*outside \[0, 10000\)"),
        (_topk(lambda t: t.ids.__setitem__((1, 0), t.ids[1, 1])), "response position 1 .*repeated"),
        (_topk(lambda t: t.logprobs.__setitem__(1, -0.1)), "response position 1 .*mass"),
        (lambda s: replace(s, topk=replace(s.topk, ids=s.topk.ids[:1])), "expected"),
        (lambda s: replace(s, topk=None), "'topk'"),
        (lambda s: replace(s, topk=replace(s.topk, logprobs=s.topk.logprobs.astype(np.float16))), "float16"),
        (lambda s: replace(s, topk=replace(s.topk, tail=s.topk.tail + np.float32(0.5))), "mass"),
        (lambda s: replace(s, topk=TopKTable.join([s.topk, s.topk])), "expected"),
        (_first_row("sampled_logprobs"), r"sampled is float32 \[1\], expected float32 \[2\]"),
        (_first_row("logits"), r"logits is float16 \[1, 10000\], expected float32 or float16 \[2, 10000\]"),
        (_first_row("hidden"), r"hidden is float32 \[1, 5\], expected float32 \[2, 5\]"),
    ],
)
def test_bad_scores_are_refused_by_rank_and_sample(
    change: Callable[[TeacherScores], TeacherScores], pattern: str
) -> None:
    """Fails if NaN, an invalid distribution or another sequence's rows are accepted."""
    valid, bad = make_rollout(1, 2, 2, sample=1), make_rollout(3, 2, 2, sample=2)
    with pytest.raises(TeacherError, match=f"actor rank 3: prompt 3, sample 2: .*{pattern}"):
        check([valid, bad], [make_scores(valid), change(make_scores(bad))])


def test_scores_of_a_server_are_checked_for_shape_alone() -> None:
    """Fails if a rank repeats the client's check of values, or trains on rows of another sequence or no table."""
    valid, other = make_rollout(1, 2, 2, sample=1), make_rollout(3, 2, 2, sample=2)
    checked = partial(check_batch, [valid, other], where="rank 3", n_vocab=N_VOCAB, hidden_size=D, with_values=False)
    nan = make_scores(other)
    for signal in ALL:
        table = getattr(nan, SIGNAL_FIELDS[cast(Signal, signal)])
        (table.logprobs if signal == "topk" else table)[1] = np.nan
    checked([make_scores(valid), nan], signals=ALL)
    shorter = make_scores(make_rollout(3, 2, 1))
    for signal in ALL:
        for bad in (shorter, TeacherScores()):
            with pytest.raises(TeacherError, match="rank 3: prompt 3, sample 2"):
                checked([make_scores(valid), bad], signals=(signal,))


@pytest.mark.parametrize("signal", [*ALL, "reference"])
def test_an_error_names_the_position_in_the_response(signal: str) -> None:
    """Fails if the row of a token is taken for its position, where a trajectory has observations."""
    rollouts = [make_rollout(1, 2, 6, own=0b110011), make_rollout(3, 2, 7, sample=1, own=0b1100110)]
    scores = [make_scores(rollout) for rollout in rollouts]
    scores = [replace(score, reference_logprobs=score.sampled_logprobs) for score in scores]
    field = "reference_logprobs" if signal == "reference" else SIGNAL_FIELDS[cast(Signal, signal)]
    table = getattr(scores[1], field)
    values = (table.logprobs if signal == "topk" else table).copy()
    values[2] = np.nan  # the third own token
    bad = replace(scores[1], **{field: replace(table, logprobs=values) if signal == "topk" else values})
    checked = ("sampled",) if signal == "reference" else (cast(Signal, signal),)
    with pytest.raises(TeacherError, match=r"prompt 3, sample 1: .*response position 5 \(1 rows\)"):
        check_batch(rollouts, [scores[0], bad], where="rank 3", n_vocab=N_VOCAB, signals=checked, with_reference=True)


def test_a_reference_goes_with_a_teacher_of_other_tokens() -> None:
    """Fails if the reference, which reads the student's tokens, shall have as many rows as the teacher."""
    rollout = make_rollout(1, 2, 5)
    scores = make_scores(rollout)
    scores = replace(
        scores,
        hidden=np.ones((3, 4), np.float32),
        response_ids=np.arange(3, dtype=np.int32),
        reference_logprobs=scores.sampled_logprobs,
    )
    checked = partial(check_batch, [rollout], where="rank 3", n_vocab=N_VOCAB, signals=("hidden",), with_reference=True)
    checked([scores])
    with pytest.raises(TeacherError):
        checked([replace(scores, reference_logprobs=np.zeros(3, np.float32))])
    with pytest.raises(TeacherError):
        checked([replace(scores, hidden=np.ones((5, 4), np.float32))])


def test_scores_of_another_number_of_sequences_are_refused() -> None:
    """Fails if sequences without scores are silently dropped."""
    rollouts = [make_rollout(1, 2, 2), make_rollout(2, 2, 2)]
    with pytest.raises(GkdError, match=r"rank 3\b.*\b1\b.*\b2\b"):
        check(rollouts, [make_scores(rollouts[0])])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 30])
def test_token_records_belong_to_their_sequence(max_tokens: int, packed: bool) -> None:
    """Fails if token_losses/ contains the loss terms of another sequence."""
    rollouts = [make_rollout(i, n_prompt=2 + i, n_response=3 + i % 2, sample=5 - i) for i in range(5)]
    scores = [make_scores(r) for r in rollouts]
    batches = make_micro_batches(rollouts, scores, micro_batch_size=2, max_tokens=max_tokens, packed=packed)
    # Values that identify the token.
    tables = [torch.stack([b.targets.sampled_ids.float(), b.targets.on_policy.float()], dim=1) for b in batches]
    # The teacher's choices: the token itself, and one that a shorter list lacks.
    choices = [torch.stack([table[:, :1].repeat(1, 3), torch.full((len(table), 3), -1.0)], dim=1) for table in tables]
    records = token_records(batches, tables, ("token", "on_policy"), rollouts[1:], choices)
    assert token_records(batches, tables, ("token", "on_policy"), rollouts[1:])[0].choices == []
    assert {r.sample_index for r in records} == {r.sample_index for r in rollouts[1:]}
    for record in records:
        assert record.values["token"] == record.response_ids and set(record.values["on_policy"]) == {1.0}
        assert record.prompt_id == 5 - record.sample_index
        (rollout,) = (r for r in rollouts if r.sample_index == record.sample_index)
        assert record.prompt_ids == rollout.prompt_ids.tolist()
        assert record.choices == [[(token, token, token)] for token in record.response_ids]
    with pytest.raises(DataError):
        token_records(batches, [torch.zeros(2, 2)], ("token", "on_policy"), rollouts)


def _pack() -> MicroBatch:
    """Return a pack of three sequences of 13, 12 and 11 tokens."""
    batch = packed(reference_batches(0)[2])
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 13, 25, 36]
    return batch


def _borders(*borders: int) -> torch.Tensor:
    return torch.tensor(borders, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": _borders(0, 13, 25, 35)}, "36 tokens"),
        ({"cu_seqlens": _borders(1, 13, 25, 36)}, "36 tokens"),
        ({"cu_seqlens": _borders(0, 13, 13, 36)}, "ascend"),
        ({"cu_seqlens": _borders()}, "ascend"),
        ({"cu_seqlens": _borders(0, 12, 25, 36)}, "position_ids"),
        ({"cu_seqlens": _borders(0, 13, 25, 36).long()}, "int32"),
        ({"cu_seqlens": None}, "without cu_seqlens"),
        ({"position_ids": torch.arange(36)[None]}, "position_ids"),
        ({"tokens": torch.ones(2, 18, dtype=torch.long), "position_ids": torch.arange(36).view(2, 18)}, "cu_seqlens"),
    ],
)
def test_an_invalid_pack_is_refused(change: dict[str, Any], message: str) -> None:
    """Fails if sequences could attend to each other, or tokens get other positions than in the rollout."""
    with pytest.raises(DataError, match=message):
        check_micro_batch(replace(_pack(), **change), needs_scores=True)
