"""Balance over data-parallel groups: everybody has about as many tokens, nothing is lost, nothing depends on timing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.actor.megatron.layout import ParallelLayout
from gkd.actor.pool import batch_args
from gkd.data.balance import TOLERANCE, even_groups, parts, select
from gkd.data.chunks import chunk_sizes
from gkd.errors import DataError
from gkd.handles import ScoredChunk
from gkd.types import Rollout, TeacherScores

Lengths = list[list[int]]  # by group, the tokens of its sequences


def tables(lengths: Lengths) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(samples, lengths) by group; samples are numbered through."""
    starts = np.cumsum([0, *map(len, lengths)])
    samples = [np.arange(a, b, dtype=np.int32) for a, b in zip(starts, starts[1:], strict=False)]
    return samples, [np.array(group, np.int32) for group in lengths]


def totals(lengths: Lengths, groups: list[np.ndarray]) -> list[int]:
    flat = np.array([n for group in lengths for n in group], np.int64)
    return [int(flat[group].sum()) for group in groups]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 200), max_size=9), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_balance_keeps_every_sequence_once_and_never_makes_it_worse(lengths: Lengths, random) -> None:  # type: ignore[no-untyped-def]
    """Fails if a sequence is lost or trained twice, a step gets slower, a group idles, or arrival order decides."""
    samples, sizes = tables(lengths)
    groups = even_groups(samples, sizes)
    everything = sorted(int(s) for group in groups for s in group)
    assert everything == list(range(sum(map(len, lengths))))
    after = totals(lengths, groups)
    if all(lengths):
        assert max(after) <= max(map(sum, lengths))
    if len(everything) >= len(lengths):
        assert all(len(group) for group in groups)
    orders = [random.sample(range(len(group)), len(group)) for group in lengths]
    shuffled = even_groups(
        [s[order] for s, order in zip(samples, orders, strict=True)],
        [n[order] for n, order in zip(sizes, orders, strict=True)],
    )
    assert [g.tolist() for g in shuffled] == [g.tolist() for g in groups]


def test_groups_that_are_even_are_left_alone() -> None:
    """Fails if sequences travel between hosts for nothing."""
    samples, sizes = tables([[100, 50], [75, 75], [149], [151]])
    assert [g.tolist() for g in even_groups(samples, sizes)] == [s.tolist() for s in samples]


def test_two_sequences_are_exchanged_where_no_single_one_fits() -> None:
    """Fails if balance ends at what moves alone can do: here they do nothing."""
    lengths = [[60, 60], [50, 50]]
    assert sorted(totals(lengths, even_groups(*tables(lengths)))) == [110, 110]


@pytest.mark.parametrize(("dp", "per_group", "before", "moved_share"), [(4, 16, 1.25, 0.15), (8, 32, 1.25, 0.1)])
def test_a_long_tailed_mix_becomes_even_with_few_moves(
    dp: int, per_group: int, before: float, moved_share: float
) -> None:
    """Fails if the heaviest group still holds up a step, or a good part of a batch changes hosts to avoid it."""
    rng = np.random.default_rng(0)
    worst, unbalanced, moved = 0.0, [], 0
    for _ in range(40):
        lengths = (rng.lognormal(5.5, 1.0, (dp, per_group)).clip(1, 4096) + 20).astype(int).tolist()
        samples, sizes = tables(lengths)
        groups = even_groups(samples, sizes)
        after = totals(lengths, groups)
        unbalanced.append(max(map(sum, lengths)) / np.mean(after))
        worst = max(worst, max(after) / np.mean(after))
        moved += sum(len(np.setdiff1d(g, s)) for g, s in zip(groups, samples, strict=True))
    assert np.mean(unbalanced) > before, "the mix must be uneven for this test to mean much"
    assert worst <= 1 + TOLERANCE
    assert moved <= moved_share * 40 * dp * per_group


def test_a_sequence_longer_than_a_fair_share_is_alone() -> None:
    """Fails if what cannot be made even is not made as even as it can be."""
    lengths = [[900, 50, 50], [20, 20], [30]]
    groups = even_groups(*tables(lengths))
    assert sorted(totals(lengths, groups)) == [70, 100, 900]


def chunk(dp_rank: int, indices: list[int], lengths: list[int]) -> tuple[ScoredChunk, list[Rollout]]:
    """A scored chunk whose handles are words, and its rollouts."""
    rollouts = [
        Rollout(i, i, np.zeros(1, np.int32), np.zeros(n - 1, np.int32), np.zeros(n - 1, np.float32), (), "stop", False)
        for i, n in zip(indices, lengths, strict=True)
    ]
    sizes = replace(chunk_sizes(dp_rank, rollouts, 0), ref=f"rollouts of {indices}")
    return ScoredChunk(sizes, f"scores of {indices}", None, 0), rollouts


@pytest.fixture
def batch() -> list[tuple[ScoredChunk, list[Rollout]]]:
    """Two groups; the second has a fourth of the tokens."""
    return [chunk(0, [4, 0, 2], [30, 40, 10]), chunk(1, [1, 3], [5, 15]), chunk(0, [6], [80])]


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_only_ranks_that_compute_the_loss_are_given_scores(
    batch: list[tuple[ScoredChunk, list[Rollout]]], tp: int, pp: int, balance: bool
) -> None:
    """Fails if a rank fetches scores for nothing, lacks some, or ranks of a group have different sequences."""
    layouts = [ParallelLayout(tp=tp, pp=pp, world_size=2 * tp * pp, rank=rank) for rank in range(2 * tp * pp)]
    chunks, held = [c for c, _ in batch], {c.rollouts.ref: rollouts for c, rollouts in batch}
    given = batch_args(chunks, layouts, balance=balance)
    trained: dict[int, list[int]] = {}
    for layout, (takes, *handles) in zip(layouts, given, strict=True):
        mine, scores = handles[: len(takes)], handles[len(takes) :]
        assert all(handle.startswith("rollouts") for handle in mine)
        wanted = [handle.replace("rollouts", "scores") for handle in mine] if layout.is_last_stage else []
        assert scores == wanted
        chosen, _ = select(takes, [held[handle] for handle in mine], None)
        indices = [r.sample_index for r in chosen]
        assert trained.setdefault(layout.dp_rank, indices) == indices
    assert sorted(trained[0] + trained[1]) == [0, 1, 2, 3, 4, 6]
    sizes = {r.sample_index: r.n_tokens for _, rollouts in batch for r in rollouts}
    heaviest = max(sum(sizes[i] for i in indices) for indices in trained.values())
    assert heaviest == (90 if balance else 160)
    if not balance:
        assert [takes for takes, *_ in given] == [[None, None] if g.dp_rank == 0 else [None] for g in layouts]


def test_scores_stay_with_their_rollouts(batch: list[tuple[ScoredChunk, list[Rollout]]]) -> None:
    """Fails if a sequence that moved is trained on another one's scores."""
    for share in parts([c for c, _ in batch], 2, balance=True):
        held = [next(rollouts for c, rollouts in batch if c is part.chunk) for part in share]
        scores = [
            [TeacherScores(sampled_logprobs=r.rollout_logprobs + r.sample_index) for r in chunk] for chunk in held
        ]
        rollouts, scored = select([part.take for part in share], held, scores)
        assert scored is not None and len(rollouts) == len(scored) > 0
        for rollout, score in zip(rollouts, scored, strict=True):
            assert score.sampled_logprobs is not None and (score.sampled_logprobs == rollout.sample_index).all()


def test_a_chunk_that_is_not_what_its_sizes_said_is_refused(batch: list[tuple[ScoredChunk, list[Rollout]]]) -> None:
    """Fails if a sequence that a rank was to train on is silently left out."""
    rollouts = batch[0][1]
    with pytest.raises(DataError, match="has 1 of the 2 sequences"):
        select([np.array([4, 9], "<i4").tobytes()], [rollouts], None)
    with pytest.raises(DataError, match="3 rollouts has scores of 2 sequences"):
        select([None], [rollouts], [[TeacherScores()] * 2])
