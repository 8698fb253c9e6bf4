"""Scatter sequences over groups and ranks, select them there, gather the results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.actor.megatron.layout import ParallelLayout
from gkd.data.chunks import chunk_sizes, part_of
from gkd.data.scatter import (
    TOLERANCE,
    ChunkInputs,
    _Group,
    even_groups,
    gather_results,
    map_selected,
    scatter_to_groups,
    scatter_to_ranks,
    select,
)
from gkd.errors import DataError
from gkd.types import Rollout, ScoredChunk, TeacherScores
from tests.rollout_chunks import chunk_of


def rollout(index: int, n_tokens: int) -> Rollout:
    n = n_tokens - 1
    return Rollout(index, index, np.zeros(1, np.int32), np.zeros(n, np.int32), np.zeros(n, np.float32), (), "stop")


def scored_chunk(dp_rank: int, samples: list[int], n_tokens: list[int]) -> tuple[ScoredChunk, list[Rollout]]:
    """A scored chunk whose handles are texts, and its rollouts."""
    rollouts = [rollout(i, n) for i, n in zip(samples, n_tokens, strict=True)]
    sizes = replace(chunk_sizes(dp_rank, [replace(r, on_policy=False) for r in rollouts], 0), ref=f"rollouts {samples}")
    return ScoredChunk(sizes, f"scores {samples}", None, 0), rollouts


@pytest.fixture
def batch() -> list[tuple[ScoredChunk, list[Rollout]]]:
    """Two groups; the second has an eighth of the tokens."""
    return [scored_chunk(0, [4, 0, 2], [30, 40, 10]), scored_chunk(1, [1, 3], [5, 15]), scored_chunk(0, [6], [80])]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_only_ranks_that_compute_the_loss_get_scores(
    batch: list[tuple[ScoredChunk, list[Rollout]]], tp: int, pp: int
) -> None:
    """Fails if a rank fetches scores it does not use, lacks some, or ranks of a group have different sequences."""
    layouts = [ParallelLayout(tp=tp, pp=pp, world_size=2 * tp * pp, rank=rank) for rank in range(2 * tp * pp)]
    chunks, stored = [c for c, _ in batch], {c.rollouts.ref: rollouts for c, rollouts in batch}
    groups = scatter_to_groups(chunks, 2)
    of_ranks = [ChunkInputs.of_parts(groups[layout.dp_rank], is_last_stage=layout.is_last_stage) for layout in layouts]
    trained: dict[int, list[int]] = {}
    for layout, inputs in zip(layouts, of_ranks, strict=True):
        refs: list[Any] = list(inputs.rollouts)
        assert inputs.scores == [ref.replace("rollouts", "scores") for ref in refs if layout.is_last_stage]
        selected, _ = select(inputs.indices, [stored[ref] for ref in refs], None)
        samples = [r.sample_index for r in selected]
        assert trained.setdefault(layout.dp_rank, samples) == samples
    assert sorted(trained[0] + trained[1]) == [0, 1, 2, 3, 4, 6]
    n_tokens = {r.sample_index: r.n_tokens for _, rollouts in batch for r in rollouts}
    heaviest = max(sum(n_tokens[i] for i in samples) for samples in trained.values())
    assert heaviest == 90, "the first group generated 160"


def test_scores_stay_with_their_rollouts(batch: list[tuple[ScoredChunk, list[Rollout]]]) -> None:
    """Fails if a sequence that moved to another group is trained on the scores of another sequence."""
    for parts in scatter_to_groups([c for c, _ in batch], 2):
        chunks = [next(rollouts for c, rollouts in batch if c is part.chunk) for part in parts]
        scores = [
            [TeacherScores(sampled_logprobs=r.rollout_logprobs + r.sample_index) for r in chunk] for chunk in chunks
        ]
        rollouts, selected = select([part.sequence_indices for part in parts], chunks, scores)
        assert selected is not None and len(rollouts) == len(selected) > 0
        for sequence, score in zip(rollouts, selected, strict=True):
            assert score.sampled_logprobs is not None and (score.sampled_logprobs == sequence.sample_index).all()


def test_a_chunk_without_a_selected_sequence_is_refused() -> None:
    """Fails if a sequence that a rank has to train on is silently left out."""
    rollouts = [rollout(i, 5) for i in range(3)]
    for indices in ([1, 3], [-1]):
        selection = np.array(indices, "<i4").tobytes()
        with pytest.raises(DataError, match=str(indices[-1])):
            select([selection], [rollouts], None)
        with pytest.raises(DataError, match=str(indices[-1])):
            map_selected([selection], [rollouts], list)
    with pytest.raises(DataError):
        select([None], [rollouts], [[TeacherScores()] * 2])


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=16), min_size=1, max_size=8), st.integers(1, 9))
def test_every_sequence_is_computed_once_and_comes_back_in_order(lengths: list[list[int]], n_ranks: int) -> None:
    """Fails if a sequence is scored twice or never, ranks are uneven, or a result reaches another sequence."""
    # The samples of two chunks have the same numbers, as those of two evaluations.
    ranks = scatter_to_ranks([chunk_of(range(len(each)), each, n_prompt=0) for each in lengths], n_ranks)
    chunks = [[rollout(i, n) for i, n in enumerate(each)] for each in lengths]
    assert len(ranks) == n_ranks
    parts: list[list[tuple[bytes | None, list[tuple[int, int]]]]] = [[] for _ in chunks]
    tokens = []
    for own in ranks:
        selected = [chunks[part.chunk_index] for part in own]
        indices = [part.sequence_indices for part in own]
        results = map_selected(indices, selected, lambda rollouts: [(r.sample_index, r.n_tokens) for r in rollouts])
        assert all(results)
        tokens.append(sum(n for part in results for _, n in part))
        for part, result in zip(own, results, strict=True):
            parts[part.chunk_index].append((part.sequence_indices, result))
    for each, of_chunk in zip(lengths, parts, strict=True):
        gathered = gather_results([selection for selection, _ in of_chunk], [result for _, result in of_chunk])
        assert gathered == list(enumerate(each))
    flat = [n for each in lengths for n in each]
    assert max(tokens) <= 1.01 * sum(flat) / n_ranks + max(flat)


def test_a_rank_without_sequences_joins_the_computation() -> None:
    """Fails if a rank without sequences skips a collective that the others wait in."""
    calls: list[list[Rollout]] = []

    def compute(rollouts: list[Rollout]) -> list[int]:
        calls.append(rollouts)
        return []

    assert map_selected([], [], compute) == [] and calls == [[]]
    assert scatter_to_ranks([], 2) == [[], []]


def test_whole_chunks_stay_whole() -> None:
    """Fails if an even distribution splits chunks without need, and each rank has to fetch all of them."""
    ranks = scatter_to_ranks([chunk_of(range(16 * i, 16 * (i + 1)), 9) for i in range(4)], 4)
    assert [[part.chunk_index for part in parts] for parts in ranks] == [[0], [1], [2], [3]]
    assert all(part.sequence_indices is None for parts in ranks for part in parts)


def test_results_that_overlap_or_are_missing_are_refused() -> None:
    """Fails if one sequence's result is used for another where two ranks computed the same one."""
    for selections in ([None, None], [np.array([0], "<i4").tobytes()] * 2):
        with pytest.raises(DataError):
            gather_results(selections, [["a"], ["b"]])


def test_parts_of_one_chunk_are_selected_at_their_places() -> None:
    """Fails if a step that takes a part of a chunk trains on other sequences of it, or a result gets lost."""
    rollouts = [rollout(i, 3 + i) for i in range(8)]
    whole = replace(chunk_sizes(0, [replace(r, on_policy=False) for r in rollouts], 0), ref="list")
    taken = [part_of(whole, [1, 2, 6]), part_of(part_of(whole, [3, 4, 5, 7]), [0, 3])]
    assert part_of(whole, range(8)) is whole and taken[1].sample_index.tolist() == [3, 7]
    assert taken[0].n_response.tolist() == [len(rollouts[i].response_ids) for i in (1, 2, 6)]
    groups = scatter_to_groups([ScoredChunk(part, "scores", None, 0) for part in taken], 2)
    found = [select([part.sequence_indices], [rollouts], None)[0] for parts in groups for part in parts]
    assert sorted(r.sample_index for each in found for r in each) == [1, 2, 3, 6, 7]
    assert groups[0] and groups[1]
    ranks = scatter_to_ranks(taken, 2)
    of_first = [part.sequence_indices for parts in ranks for part in parts if part.chunk_index == 0]
    results = [map_selected([s], [rollouts], lambda rows: [r.sample_index for r in rows])[0] for s in of_first]
    assert gather_results(of_first, results) == [None, 1, 2, None, None, None, 6]


Lengths = list[list[int]]  # by group, the tokens of its sequences


def tables(lengths: Lengths) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return (samples, lengths) by group; samples are numbered over all groups."""
    starts = np.cumsum([0, *map(len, lengths)])
    samples = [np.arange(a, b, dtype=np.int32) for a, b in zip(starts, starts[1:], strict=False)]
    return samples, [np.array(group, np.int32) for group in lengths]


def totals(lengths: Lengths, groups: list[np.ndarray]) -> list[int]:
    flat = np.array([n for group in lengths for n in group], np.int64)
    return [int(flat[group].sum()) for group in groups]


@settings(max_examples=150)
@given(st.lists(st.lists(st.integers(1, 200), max_size=9), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_balance_keeps_every_sequence_once_and_never_makes_it_worse(lengths: Lengths, random) -> None:  # type: ignore[no-untyped-def]
    """Fails if a sequence is lost or trained twice, a step gets slower, a group idles, or arrival order decides."""
    samples, sizes = tables(lengths)
    groups = even_groups(samples, sizes)
    all_samples = sorted(int(s) for group in groups for s in group)
    assert all_samples == list(range(sum(map(len, lengths))))
    after = totals(lengths, groups)
    if all(lengths):
        assert max(after) <= max(map(sum, lengths))
    if len(all_samples) >= len(lengths):
        assert all(len(group) for group in groups)
    orders = [random.sample(range(len(group)), len(group)) for group in lengths]
    shuffled = even_groups(
        [s[order] for s, order in zip(samples, orders, strict=True)],
        [n[order] for n, order in zip(sizes, orders, strict=True)],
    )
    assert [g.tolist() for g in shuffled] == [g.tolist() for g in groups]


@settings(max_examples=100)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.lists(st.floats(-5, 30), min_size=1, max_size=12))
def test_nearest_is_that_of_a_search_over_all_sequences(lengths: list[int], wanted: list[float]) -> None:
    """Fails if the bisection finds another sequence than a plain search: layouts of earlier runs would change."""
    group = _Group(np.arange(len(lengths), dtype=np.int32), np.array(lengths, np.int32))
    plain = [int(np.abs(group.lengths - length).argmin()) for length in wanted]
    assert group.all_nearest(np.array(wanted)).tolist() == plain == [group.nearest(length) for length in wanted]


def test_even_groups_are_not_changed() -> None:
    """Fails if sequences move between hosts without need."""
    samples, sizes = tables([[100, 50], [75, 75], [149], [151]])
    assert [g.tolist() for g in even_groups(samples, sizes)] == [s.tolist() for s in samples]


def test_two_sequences_are_exchanged_if_no_single_move_helps() -> None:
    """Fails if only single moves are tried: here none of them helps."""
    lengths = [[60, 60], [50, 50]]
    assert sorted(totals(lengths, even_groups(*tables(lengths)))) == [110, 110]


@pytest.mark.parametrize(("dp", "per_group", "before", "moved_share"), [(4, 16, 1.25, 0.15), (8, 32, 1.25, 0.1)])
def test_a_long_tailed_mix_becomes_even_with_few_moves(
    dp: int, per_group: int, before: float, moved_share: float
) -> None:
    """Fails if the heaviest group still delays a step, or a large part of a batch moves to another host for it."""
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
    assert np.mean(unbalanced) > before, "the lengths must be uneven for this test to be meaningful"
    assert worst <= 1 + TOLERANCE
    assert moved <= moved_share * 40 * dp * per_group


def test_a_sequence_longer_than_the_mean_total_is_alone() -> None:
    """Fails if groups that cannot be even are not made as even as possible."""
    lengths = [[900, 50, 50], [20, 20], [30]]
    assert sorted(totals(lengths, even_groups(*tables(lengths)))) == [70, 100, 900]
