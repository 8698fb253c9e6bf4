"""Which data-parallel group trains on which sequence: the groups' token totals made about even.

A step takes as long as its heaviest group. A prompt's place in the batch says which group its sequences are written
and scored for; once all lengths are known, a few sequences move from heavy groups to light ones. The loss is a
token mean over the global batch, so it does not depend on who computes which part of it.

What counts is tokens, prompt and response; attention's quadratic part is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gkd.errors import DataError
from gkd.handles import ScoredChunk
from gkd.types import Rollout, TeacherScores

# The heaviest group may have this share of the mean more: below it another move costs more than it gains.
TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class Part:
    """Those sequences of a chunk that one data-parallel group trains on."""

    chunk: ScoredChunk
    take: bytes | None  # their sample_index, int32, in the chunk's order; None: all of the chunk


def parts(batch: Sequence[ScoredChunk], dp_size: int, *, balance: bool) -> list[list[Part]]:
    """By data-parallel group, its part of each chunk that it has any of, in the order of `batch`.

    Args:
        balance: even out the groups' tokens; else each group trains on what was written for it.
    """
    if not balance:
        return [[Part(c, None) for c in batch if c.rollouts.dp_rank == rank] for rank in range(dp_size)]
    samples = [_joined([c.rollouts.sample_index for c in batch if c.rollouts.dp_rank == g]) for g in range(dp_size)]
    lengths = [_joined([c.rollouts.n_tokens for c in batch if c.rollouts.dp_rank == g]) for g in range(dp_size)]
    shares: list[list[Part]] = []
    for mine in even_groups(samples, lengths):
        share = []
        for chunk in batch:
            chosen = np.isin(chunk.rollouts.sample_index, mine)
            if chosen.any():
                some = chunk.rollouts.sample_index[chosen].astype("<i4").tobytes()
                share.append(Part(chunk, None if chosen.all() else some))
        shares.append(share)
    return shares


def select(
    takes: Sequence[bytes | None], rollouts: Sequence[list[Rollout]], scores: Sequence[list[TeacherScores]] | None
) -> tuple[list[Rollout], list[TeacherScores] | None]:
    """The other end of `parts`: a group's sequences, out of the chunks that it was given.

    Args:
        takes: `Part.take` of each chunk.
        scores: of the chunks; None on pipeline stages that compute no loss.

    Raises:
        DataError: a chunk lacks a sequence that it was to have, or has not as many scores as rollouts.
    """
    chosen: list[Rollout] = []
    scored: list[TeacherScores] = []
    for i, (take, chunk) in enumerate(zip(takes, rollouts, strict=True)):
        wanted = {r.sample_index for r in chunk} if take is None else set(np.frombuffer(take, "<i4").tolist())
        places = [place for place, rollout in enumerate(chunk) if rollout.sample_index in wanted]
        if len(places) != len(wanted):
            raise DataError(f"a chunk of rollouts has {len(places)} of the {len(wanted)} sequences that it was to have")
        chosen += [chunk[place] for place in places]
        if scores is not None:
            if len(scores[i]) != len(chunk):
                raise DataError(f"a chunk of {len(chunk)} rollouts has scores of {len(scores[i])} sequences")
            scored += [scores[i][place] for place in places]
    return chosen, None if scores is None else scored


def with_references(
    scores: Sequence[list[TeacherScores]], references: Sequence[list[np.ndarray]]
) -> Sequence[list[TeacherScores]]:
    """By chunk, the scores with the reference's logprobs of the same sequences.

    Args:
        references: of the same chunks; empty: there is no reference.

    Raises:
        DataError: there are not as many.
    """
    if not references:
        return scores
    sizes = [len(chunk) for chunk in scores], [len(chunk) for chunk in references]
    if sizes[0] != sizes[1]:
        raise DataError(f"chunks of {sizes[0]} scored sequences have a reference's logprobs of {sizes[1]}")
    return [
        [replace(score, reference_logprobs=logprobs) for score, logprobs in zip(scored, chunk, strict=True)]
        for scored, chunk in zip(scores, references, strict=True)
    ]


def even_groups(samples: Sequence[np.ndarray], lengths: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Moves sequences until no group has more than 1 + TOLERANCE times the mean, or no move or exchange helps.

    The same groups give the same answer in whatever order their sequences stand. A group that has a sequence keeps one,
    and one that has none is given one if another has two.

    Args:
        samples: by group, int32, what each sequence is called: unique over all groups.
        lengths: by group, its tokens, same order.

    Returns:
        By group, the samples that it is left with, ascending.
    """
    groups = [_Group(s, n) for s, n in zip(samples, lengths, strict=True)]
    limit = (1 + TOLERANCE) * sum(g.total for g in groups) / len(groups)
    while True:
        heavy, *_ = by_weight = sorted(groups, key=lambda g: -g.total)  # stable: equal ones in the order of their ranks
        light = by_weight[-1]
        if len(light.samples) == 0:
            donor = next((g for g in by_weight if len(g.samples) > 1), None)
            if donor is None:
                break
            donor.give(light, donor.nearest((donor.total - light.total) / 2))
        elif heavy.total <= limit or not any(_relieve(heavy, other) for other in reversed(by_weight[1:])):
            break
    return [np.sort(g.samples) for g in groups]


class _Group:
    """One group's sequences, shortest first; equal ones by sample."""

    def __init__(self, samples: np.ndarray, lengths: np.ndarray) -> None:
        order = np.lexsort((samples, lengths))
        self.samples, self.lengths = samples[order], lengths[order].astype(np.int64)
        self.total = int(self.lengths.sum())

    def nearest(self, length: float) -> int:
        """Place of the sequence whose length is nearest."""
        return int(np.abs(self.lengths - length).argmin())

    def give(self, other: _Group, place: int) -> None:
        """Moves the sequence at `place` to the other group."""
        sample, length = self.samples[place], self.lengths[place]
        at = int(np.searchsorted(other.lengths, length))
        while at < len(other.lengths) and other.lengths[at] == length and other.samples[at] < sample:
            at += 1
        other.samples, other.lengths = np.insert(other.samples, at, sample), np.insert(other.lengths, at, length)
        self.samples, self.lengths = np.delete(self.samples, place), np.delete(self.lengths, place)
        other.total, self.total = other.total + int(length), self.total - int(length)


def _relieve(heavy: _Group, light: _Group) -> bool:
    """Makes the move, or else the exchange, that leaves the two most alike; False if none brings them closer.

    Moving d tokens makes a gap of g tokens |g - 2 d|, which is smaller exactly if 0 < d < g.
    """
    gap = heavy.total - light.total
    place = heavy.nearest(gap / 2)
    moved = int(heavy.lengths[place])
    # An exchange costs two moves, so it must leave less than half of the gap that a single move leaves.
    best, exchange = (abs(gap - 2 * moved) / 2 if 0 < moved < gap else float(gap)), None
    for back, length in enumerate(light.lengths.tolist()):
        out = heavy.nearest(length + gap / 2)
        more = int(heavy.lengths[out]) - length
        if 0 < more < gap and abs(gap - 2 * more) < best:
            best, exchange = abs(gap - 2 * more), (out, back)
    if exchange is not None:
        out, back = exchange
        sample = light.samples[back]
        heavy.give(light, out)
        light.give(heavy, int(np.flatnonzero(light.samples == sample)[0]))
        return True
    if 0 < moved < gap:
        heavy.give(light, place)
        return True
    return False


def _joined(tables: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *tables])
