"""Balance of tokens over data-parallel groups: even, nothing is lost, nothing depends on the order of arrival."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.data.scatter import TOLERANCE, _Group, even_groups

Lengths = list[list[int]]  # by group, the tokens of its sequences


def tables(lengths: Lengths) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return (samples, lengths) by group; samples are numbered over all groups."""
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


@settings(max_examples=100, deadline=None)
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
    groups = even_groups(*tables(lengths))
    assert sorted(totals(lengths, groups)) == [70, 100, 900]
