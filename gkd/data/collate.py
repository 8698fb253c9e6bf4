"""Collate sequences into micro-batches: padded or packed tokens, loss rows, and the teacher's tables per loss row.

Two sequences, padded to [B, S] or packed ("thd") to [1, T]; loss rows are underlined.

    p0 p1 r0 r1 r2        tokens        p0 p1 r0 r1 r2 q0 s0
       == == ==
    q0 s0  .  .  .        position_ids   0  1  2  3  4  0  1
    ==                    cu_seqlens     0              5     7

A row predicts the token after it, so if r1 were a token that the student read (`Rollout.own`), p1 and r1 would have the
rows of that sequence.

The loss of a step is (1 / N) sum over tokens of c l: a token mean. The weights c make it the mean of distill.normalize.
With w = the weight of the token's route

    token      c = w
    sequence   c = w N / (S M)     mean over sequences of the mean over tokens
    domain     c = w N / N_d       sum over routes d of w_d (1 / N_d) sum over the tokens of d

N own tokens and S sequences of the global batch, M own tokens of the sequence, N_d own tokens of its route in the
global batch. So the result depends neither on data-parallel groups nor on micro-batches, packing or pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TypeVar, overload

import numpy as np
import torch
from numpy.typing import DTypeLike

from gkd.config.schema import Route
from gkd.data.columns import ALL_COLUMNS, Columns
from gkd.errors import DataError
from gkd.text.comparison import SAME_TOKENS, Comparison
from gkd.text.targets import TextTargets
from gkd.types import SIGNAL_FIELDS, MicroBatch, Rollout, TeacherScores, TokenTargets
from teacher_server.vision.images import EncodedImage

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class MicroBatches(Sequence[MicroBatch]):
    """The micro-batches of one rank, built on each access and not cached.

    The teacher's tables may be full distributions; this avoids a second copy of all of them.

    Args:
        rollouts: sequences of the rank.
        scores: of the rollouts, in the same order, all with the same tables; with None `targets` is None.
        groups: indices into `rollouts` of the sequences of each micro-batch, in row order.
        packed: concatenate sequences in one row; otherwise pad to the longest with `pad_id`.
        weights: [len(rollouts)] float32, factor of the loss of each sequence's tokens; None means all 1.
        comparison: of the student with the teacher that made the scores.
        columns: of this rank; each micro-batch is its part, and only the targets of its rows are built.

    Raises:
        DataError: only some of the sequences have one of the teacher's tables.
    """

    rollouts: Sequence[Rollout]
    scores: Sequence[TeacherScores] | None
    groups: Sequence[Sequence[int]]
    _: KW_ONLY
    packed: bool
    pad_id: int
    weights: np.ndarray | None = None
    comparison: Comparison = SAME_TOKENS
    columns: Columns = ALL_COLUMNS

    def __post_init__(self) -> None:
        for name in (*SIGNAL_FIELDS.values(), "reference_logprobs"):
            n = sum(getattr(score, name) is not None for score in self.scores or ())
            if self.scores is not None and n not in (0, len(self.scores)):
                raise DataError(f"only {n} of the {len(self.scores)} sequences of a batch have a {name} table")

    def __len__(self) -> int:
        return len(self.groups)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...

    @overload
    def __getitem__(self, index: slice) -> MicroBatches: ...

    def __getitem__(self, index: int | slice) -> MicroBatch | MicroBatches:
        if isinstance(index, slice):
            return replace(self, groups=self.groups[index])
        group = self.groups[index]
        rollouts = [self.rollouts[i] for i in group]
        whole = _packed(rollouts) if self.packed else _padded(rollouts, self.pad_id)
        batch = self.columns.part_of(whole)
        if self.scores is not None:
            weights = None if self.weights is None else self.weights[np.array(group)]
            slices = _parts(self.columns.rows(whole).numpy(), [r.n_own for r in rollouts])
            scores = [self.scores[i] for i in group]
            batch.targets = _targets(rollouts, scores, slices, weights)
            if columns := self.comparison.text_columns(rollouts, scores):
                batch.targets.text = TextTargets(*map(torch.from_numpy, columns))
        return batch

    @property
    def samples(self) -> Iterator[tuple[int, int]]:
        """Yield (sample_index, number of rows) per sequence, in row order; builds no micro-batch."""
        for group in self.groups:
            yield from _samples([self.rollouts[i] for i in group])


def without_targets(batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
    """Return the same micro-batches; lazily built ones without targets, which are most of the cost of building them."""
    return replace(batches, scores=None) if isinstance(batches, MicroBatches) else batches


def parts_of(batches: Sequence[MicroBatch], columns: Columns) -> Sequence[MicroBatch]:
    """Return a rank's columns of the micro-batches; lazily built ones stay lazy."""
    if isinstance(batches, MicroBatches):
        return replace(batches, columns=columns)
    return [columns.part_of(batch) for batch in batches]


def _padded(rollouts: Sequence[Rollout], pad_id: int) -> MicroBatch:
    length = max(r.n_tokens for r in rollouts)
    tokens = np.full((len(rollouts), length), pad_id, dtype=np.int64)
    for row, rollout in zip(tokens, rollouts, strict=True):
        row[: rollout.n_tokens] = _tokens(rollout)
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        position_ids=torch.arange(length).expand(len(rollouts), length),
        loss_index=_loss_index(rollouts, np.arange(len(rollouts)) * length),
        targets=None,
        samples=_samples(rollouts),
        images=_images(rollouts),
    )


def _packed(rollouts: Sequence[Rollout]) -> MicroBatch:
    borders = np.concatenate([[0], np.cumsum([r.n_tokens for r in rollouts])])
    return MicroBatch(
        tokens=torch.from_numpy(np.concatenate([_tokens(r) for r in rollouts]).astype(np.int64)[None]),
        position_ids=torch.cat([torch.arange(r.n_tokens) for r in rollouts])[None],
        loss_index=_loss_index(rollouts, borders[:-1]),
        targets=None,
        samples=_samples(rollouts),
        cu_seqlens=torch.from_numpy(borders.astype(np.int32)),
        images=_images(rollouts),
    )


def _images(rollouts: Sequence[Rollout]) -> tuple[tuple[EncodedImage, ...], ...]:
    return tuple(r.images for r in rollouts) if any(r.images for r in rollouts) else ()


def _tokens(rollout: Rollout) -> np.ndarray:
    return np.concatenate([rollout.prompt_ids, rollout.response_ids])


def _samples(rollouts: Sequence[Rollout]) -> tuple[tuple[int, int], ...]:
    return tuple((r.sample_index, r.n_own) for r in rollouts)


def _loss_index(rollouts: Sequence[Rollout], starts: np.ndarray) -> torch.Tensor:
    """Return [N] int64: the position before each own token. `starts`, [B], are those of the sequences' first tokens."""
    first = [int(start) + len(r.prompt_ids) - 1 for start, r in zip(starts, rollouts, strict=True)]
    rows = [begin + _own_positions(r) for begin, r in zip(first, rollouts, strict=True)]
    return torch.from_numpy(np.concatenate(rows))


def _own_positions(rollout: Rollout) -> np.ndarray:
    """Return [M] int64, the positions in the response of the student's own tokens."""
    return np.arange(len(rollout.response_ids)) if rollout.own is None else np.flatnonzero(rollout.own)


def _turns(rollout: Rollout) -> np.ndarray:
    """Return [M] int64: the turn of each own token, counted from 0."""
    positions = _own_positions(rollout)
    return rollout.first_turn + np.cumsum(np.diff(positions, prepend=positions[0]) > 1)


def _ends(rollout: Rollout) -> np.ndarray:
    """Return [M] bool: the tokens with which the student ended a turn; none of a dataset response."""
    last = np.diff(_own_positions(rollout), append=len(rollout.response_ids)) > 1  # an observation follows
    last[-1] = rollout.finish_reason != "length"
    return last & rollout.on_policy


def _parts(rows: np.ndarray, n_own: Sequence[int]) -> list[slice]:
    """Return which of its own tokens' rows each sequence has among `rows`, see `Columns.rows`."""
    borders = np.cumsum([0, *n_own])
    stops = np.searchsorted(rows, borders)
    counts = np.diff(stops)
    firsts = [int(rows[stop] - border) if n else 0 for stop, border, n in zip(stops, borders, counts, strict=False)]
    return [slice(first, first + int(n)) for first, n in zip(firsts, counts, strict=True)]


def _targets(
    rollouts: Sequence[Rollout],
    scores: Sequence[TeacherScores],
    slices: Sequence[slice],
    weights: np.ndarray | None,
) -> TokenTargets:
    # Rows of the teacher's tables: all of them if it has other tokens.
    listed = [part if score.response_ids is None else slice(None) for part, score in zip(slices, scores, strict=True)]
    n_rows = [part.stop - part.start for part in slices]
    logprobs = [r.rollout_logprobs if r.on_policy else np.zeros(r.n_own) for r in rollouts]
    targets = TokenTargets(
        sampled_ids=_rows([r.own_ids for r in rollouts], slices, np.int64),
        rollout_logprobs=_rows(logprobs, slices, np.float32),
        on_policy=torch.from_numpy(np.repeat([r.on_policy for r in rollouts], n_rows)),
        ends=_rows([_ends(r) for r in rollouts], slices, np.bool_),
        routes=torch.from_numpy(np.repeat([r.route for r in rollouts], n_rows)),
        turns=_rows([_turns(r) for r in rollouts], slices, np.int64),
        weights=None if weights is None else torch.from_numpy(np.repeat(weights, n_rows)),
        sequences=torch.from_numpy(np.repeat(np.arange(len(n_rows)), n_rows)),
    )
    if advantages := _present([r.advantage for r in rollouts]):
        targets.advantages = torch.from_numpy(np.repeat(np.array(advantages, np.float32), n_rows))
    if topk := _present([s.topk for s in scores]):
        width = max(t.ids.shape[1] for t in topk)
        targets.topk_ids = _rows([_pad_columns(t.ids, width, -1) for t in topk], listed, np.int64)
        logprobs = [_pad_columns(t.logprobs, width, -np.inf) for t in topk]
        targets.topk_logprobs = _rows(logprobs, listed, np.float32)
        targets.tail_mass = _rows([t.tail for t in topk], listed, np.float32)
    if sampled := _present([s.sampled_logprobs for s in scores]):
        targets.sampled_logprobs = _rows(sampled, listed, np.float32)
    if logits := _present([s.logits for s in scores]):
        targets.logits = _rows(logits, listed, logits[0].dtype)
    if hidden := _present([s.hidden for s in scores]):
        targets.hidden = _rows(hidden, listed, np.float32)
    if reference := _present([s.reference_logprobs for s in scores]):
        targets.reference_logprobs = _rows(reference, slices, np.float32)
    return targets


def _rows(tables: Sequence[np.ndarray], slices: Sequence[slice], dtype: DTypeLike) -> torch.Tensor:
    """Concatenate a part of each table into new memory: arrays from the object store are read-only."""
    selected = [table[part] for table, part in zip(tables, slices, strict=True)]
    return torch.from_numpy(np.concatenate(selected, dtype=dtype, casting="same_kind"))


def _present(tables: Sequence[T | None]) -> list[T]:
    """Return the tables that are not None: all of them or none."""
    return [table for table in tables if table is not None]


def _pad_columns(table: np.ndarray, width: int, filler: float) -> np.ndarray:
    """Pad [R, K] to [R, width]."""
    missing = width - table.shape[1]
    return table if missing == 0 else np.pad(table, ((0, 0), (0, missing)), constant_values=filler)


def route_counts(rollouts: Sequence[Rollout], n_routes: int) -> np.ndarray:
    """Return the own tokens and the sequences of each route: [n_routes, 2] float64, to be summed over groups."""
    counts = np.zeros((n_routes, 2))
    for rollout in rollouts:
        counts[rollout.route] += rollout.n_own, 1
    return counts


def sequence_weights(
    rollouts: Sequence[Rollout], counts: np.ndarray, routes: Sequence[Route], normalize: str
) -> np.ndarray:
    """Return the factor c of each sequence: [n] float32.

    Args:
        counts: [n_routes, 2], of the global batch, see `route_counts`.
        normalize: distill.normalize.
    """
    n_tokens, n_sequences = counts.sum(axis=0)
    weights = np.array([routes[rollout.route].weight * rollout.factor for rollout in rollouts])
    if normalize == "sequence":
        weights *= n_tokens / (n_sequences * np.array([rollout.n_own for rollout in rollouts]))
    if normalize == "domain":
        weights *= n_tokens / counts[[rollout.route for rollout in rollouts], 0]
    return weights.astype(np.float32)


def size_numbers(counts: np.ndarray, routes: Sequence[Route]) -> dict[str, float]:
    """Return the share of the tokens and the mean response length of each route; nothing for a single teacher."""
    numbers = {}
    for route, (n_tokens, n_sequences) in zip(routes, counts.tolist(), strict=True):
        if route.name and counts.any():
            numbers[f"domain/{route.name}/tokens_share"] = n_tokens / counts[:, 0].sum()
            if n_sequences:
                numbers[f"domain/{route.name}/length"] = n_tokens / n_sequences
    return numbers
