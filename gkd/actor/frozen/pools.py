"""Driver side of the frozen models on the actor's ranks: scores of a local teacher, logprobs of a reference.

    collect, compute_logprobs    sequences scattered so that each rank has about the same number of tokens; an actor
                                 that is its own reference: each data-parallel group, whose ranks compute together
                                 -> one collective call on all ranks
                                 -> the parts of each chunk gathered on the host of the group that trains on it

Only the loop's own thread calls the actor. So every rank receives these calls at the same point of its sequence of
calls, whatever the engines and a teacher server do meanwhile. With a local teacher, nothing may be scored during a
training step: `trainer.scheduler` is sync, or batches are replayed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gkd.actor.megatron.layout import layouts_of
from gkd.cluster.calls import Pending, gather
from gkd.config.schema import Config
from gkd.config.schema_teacher import ACTOR
from gkd.data.scatter import scatter_to_ranks
from gkd.scoring.pool import RECORDS, RecordedScoring
from gkd.types import PendingScores, Recording, RolloutChunk, ScoredChunk

ACTOR_RANK = "actor rank"


class LocalScoring(RecordedScoring):
    """Implement `gkd.roles.ScoringRole` over processes that score complete batches, and endpoints without a teacher.

    `collect` and `record` may call these processes. On shared GPUs, call them in the training phase
    (`gkd.pipeline.colocation`).

    Args:
        workers: returns the processes with a method `score`: the actor's in rank order, or rollout engines.
        of: what they are, for errors.
    """

    def __init__(
        self, workers: Callable[[], Sequence[Any]], endpoints: Sequence[Any], timeout_s: float, of: str = ACTOR_RANK
    ) -> None:
        super().__init__(endpoints, timeout_s)
        self._workers = workers
        self._of = of

    def submit(self, chunk: RolloutChunk) -> PendingScores:
        """Return a chunk without handles: it is scored when it is collected."""
        return PendingScores(chunk, None, None)

    def collect(self, pending: Sequence[PendingScores]) -> list[ScoredChunk]:
        """Score the chunks that have no scores yet; blocks for a forward pass. Raises TeacherError."""
        return super().collect(self._with_scores(pending))

    def record(
        self, chunks: Sequence[PendingScores | ScoredChunk], folder: Path, label: str, *, scored: bool
    ) -> Recording:
        """As `RecordedScoring.record`; with `scored`, chunks without scores are scored first."""
        if scored:
            results = iter(self._with_scores([chunk for chunk in chunks if isinstance(chunk, PendingScores)]))
            chunks = [next(results) if isinstance(chunk, PendingScores) else chunk for chunk in chunks]
        return super().record(chunks, folder, label, scored=scored)

    def _with_scores(self, pending: Sequence[PendingScores]) -> list[PendingScores]:
        results = iter(self._score([p.rollouts for p in pending if p.summary is None]))
        return [next(results) if p.summary is None else p for p in pending]

    def _score(self, chunks: Sequence[RolloutChunk]) -> list[PendingScores]:
        if not chunks:
            return []
        calls, results = call_scattered(self._workers(), "score", chunks, of=self._of)
        gather(calls, "teacher scoring", self._timeout_s)
        scored = []
        for chunk, reply in zip(chunks, results, strict=True):
            endpoint = self._endpoints[chunk.dp_rank]
            scores, summary = endpoint.gather_scores.options(num_returns=2).remote(reply.sequence_indices, *reply.refs)
            scored.append(PendingScores(chunk, scores, summary))
        return scored


class NoTeacher(LocalScoring):
    """Return chunks without scores, for evaluations without a teacher."""

    def collect(self, pending: Sequence[PendingScores]) -> list[ScoredChunk]:
        return [ScoredChunk(chunk.rollouts, None, None, 0) for chunk in pending]


class PendingReference:
    """A batch whose reference logprobs are being computed.

    Args:
        begin: starts the calls; returns them and each chunk's handle of logprobs.
    """

    def __init__(self, begin: Callable[[], tuple[Pending, list[Any]]]) -> None:
        self._begin = functools.cache(begin)

    def start(self) -> Pending:
        """Start the calls now instead of in `wait`, and return them."""
        return self._begin()[0]

    def wait(self, batch: Sequence[ScoredChunk], timeout_s: float | None = None) -> list[ScoredChunk]:
        """Return the batch, each chunk with the handle of its logprobs. May be repeated. Raises as `Pending.wait`.

        Args:
            batch: the chunks of the call, scored, in the same order.
        """
        calls, handles = self._begin()
        calls.wait(timeout_s)
        return [replace(chunk, reference=handle) for chunk, handle in zip(batch, handles, strict=True)]


class ReferencePool:
    """Implement `gkd.roles.ReferenceRole` over the actor's workers, in rank order, and the scoring endpoints."""

    def __init__(self, workers: Sequence[Any], endpoints: Sequence[Any], config: Config) -> None:
        self._workers = list(workers)
        self._endpoints = list(endpoints)
        self._timeout_s = config.trainer.stage_timeout_s
        derived = config.derived
        self._method = "reference_logprobs"
        self._options = dict[str, Any]()
        if derived.reference_is_actor:
            groups = data_parallel_groups(len(workers), config)
            # The training step follows immediately, so the actor's weights stay on the device.
            without_adapters = {"disable_adapter": True, "is_offload_states": False}
            self._method = "compute_logprobs"
            self._options = {"groups": groups, **without_adapters}
        # A local teacher scores on the same ranks, with the actor's weights offloaded: before they are reloaded here.
        self._starts_in_wait = derived.teacher_pool == ACTOR

    def compute_logprobs(
        self, batch: Sequence[PendingScores | ScoredChunk], *, blocking: bool = True
    ) -> PendingReference:
        """Compute the reference logprobs of a batch, see `gkd.roles.ReferenceRole`.

        The reference term excludes dataset responses: they get zeros without a forward pass.
        """
        pending = PendingReference(functools.partial(self._begin, [chunk.rollouts for chunk in batch]))
        if blocking:
            pending.start().wait()
        elif not self._starts_in_wait:
            pending.start()
        return pending

    def _begin(self, batch: Sequence[RolloutChunk]) -> tuple[Pending, list[Any]]:
        on_policy = [chunk for chunk in batch if chunk.on_policy]
        calls, results = call_scattered(self._workers, self._method, on_policy, **self._options)
        computed = iter(results)
        handles = []
        for chunk in batch:
            endpoint = self._endpoints[chunk.dp_rank]
            # This concurrency group does not wait for requests to a teacher server, which may be the next batch's.
            if chunk.on_policy:
                reply = next(computed)
                gather_results = endpoint.gather_results.options(concurrency_group=RECORDS)
                handles.append(gather_results.remote(reply.sequence_indices, *reply.refs))
            else:
                handles.append(endpoint.zeros.options(concurrency_group=RECORDS).remote(chunk.ref))
        return Pending(calls, "reference logprobs", self._timeout_s), handles


@dataclass(slots=True)
class PartialResults:
    """The parts that ranks compute of one chunk."""

    sequence_indices: list[bytes | None] = field(default_factory=list)  # one per part, see `gkd.data.scatter`
    refs: list[Any] = field(default_factory=list)  # handle of each part's list of results


def data_parallel_groups(world_size: int, config: Config) -> list[list[int]]:
    """Return the ranks of each data-parallel group."""
    layouts = layouts_of(config.actor, world_size)
    return [[layout.rank for layout in layouts if layout.dp_rank == group] for group in range(layouts[0].dp)]


def call_scattered(
    workers: Sequence[Any],
    method: str,
    chunks: Sequence[RolloutChunk],
    *,
    groups: Sequence[Sequence[int]] | None = None,
    attention_length: float = math.inf,
    of: str = ACTOR_RANK,
    **options: Any,
) -> tuple[dict[str, Any], list[PartialResults]]:
    """Start one collective call on the actor's ranks; returns at once.

    Args:
        method: of `ActorWorker`; called with the sequence_indices of each chunk and the chunks' rollouts. It returns
            a value for the whole call, and then a list of results for each chunk.
        groups: ranks that compute the same sequences together and return the same. None: each rank computes its own.
        attention_length: of the model that computes, see `gkd.data.scatter.work`.
        of: what the workers are, for errors.
        options: keyword arguments of the call.

    Returns:
        (handles of the calls by rank's name, the parts of each chunk).
    """
    calls: dict[str, Any] = {}
    results = [PartialResults() for _ in chunks]
    # Every rank is called, also one without a sequence: each layer's weights are gathered from all of them.
    groups = groups or [[rank] for rank in range(len(workers))]
    for ranks, chunk_parts in zip(groups, scatter_to_ranks(chunks, len(groups), attention_length), strict=True):
        sequence_indices = [part.sequence_indices for part in chunk_parts]
        rollouts = [chunks[part.chunk_index].ref for part in chunk_parts]
        for rank in ranks:
            call = getattr(workers[rank], method).options(num_returns=1 + len(chunk_parts))
            returned = call.remote(sequence_indices, *rollouts, **options)
            calls[f"{of} {rank}"], *refs = returned if chunk_parts else [returned]
        # These are the results of the group's last rank; the others' are freed.
        for part, ref in zip(chunk_parts, refs, strict=True):
            results[part.chunk_index].sequence_indices.append(part.sequence_indices)
            results[part.chunk_index].refs.append(ref)
    return calls, results
