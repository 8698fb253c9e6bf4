"""Driver side of scoring: submit chunks to the endpoint of their data-parallel group and collect handles of the scores.

Also lets the endpoints write chunks in flight to a checkpoint and read them again.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gkd.cluster.calls import all_done, answers, drain, fetch, gather, wait_all
from gkd.data.chunks import CHUNK_SIZE, decode_sizes
from gkd.data.scatter import encode_part
from gkd.errors import ClusterError
from gkd.roles import Computation
from gkd.scoring.group_endpoint import ScoreSummary
from gkd.types import FileDigest, PendingScores, Recording, RolloutChunk, ScoredChunk, TeacherHealth

# Concurrency group of the endpoints: recording and restoring run concurrently with scoring.
RECORDS = "records"
# Concurrency group of their health, which answers while all threads that score wait for the teacher.
HEALTH = "health"
_HEALTH_S = 2.0  # limit of the wait for it
TAKE_EVERY_S = 20.0  # between calls for what the teacher computed
_PER_CHUNK = 4  # objects per chunk of `ScoringEndpoint.restore`


class RecordedScoring(ABC):
    """The part of `gkd.roles.ScoringRole` that does not depend on the teacher; one endpoint per data-parallel group."""

    def __init__(self, endpoints: Sequence[Any], timeout_s: float) -> None:
        self._endpoints = list(endpoints)
        self._timeout_s = timeout_s

    @abstractmethod
    def submit(self, chunk: RolloutChunk) -> PendingScores: ...

    def take_computations(self, *, wait: bool) -> Mapping[str, Sequence[Computation]]:
        """Return nothing: there is no teacher server."""
        return {}

    def collect(self, pending: Sequence[PendingScores]) -> list[ScoredChunk]:
        # Several parts of a batch may be of the same chunk.
        names = {p.summary: f"chunk {i} (scoring endpoint {p.rollouts.dp_rank})" for i, p in enumerate(pending)}
        encoded = gather({name: ref for ref, name in names.items()}, "teacher scoring", self._timeout_s)
        summaries = {name: ScoreSummary.decode(data) for name, data in encoded.items()}
        return [summaries[names[p.summary]].scored(p) for p in pending]

    def record(
        self, chunks: Sequence[PendingScores | ScoredChunk], folder: Path, label: str, *, scored: bool
    ) -> Recording:
        """See `ScoringRole.record`. Writes one file per group: `<label>_group_<dp_rank>.npz`."""
        groups: dict[int, list[PendingScores | ScoredChunk]] = defaultdict(list)
        for chunk in chunks:
            groups[chunk.rollouts.dp_rank].append(chunk)
        refs = {}
        for dp_rank, group in sorted(groups.items()):
            file = folder.absolute() / f"{label}_group_{dp_rank}.npz"
            refs_of_group = [chunk.rollouts.ref for chunk in group] + ([chunk.ref for chunk in group] if scored else [])
            record = self._endpoints[dp_rank].record.options(concurrency_group=RECORDS)
            selections = [encode_part(chunk.rollouts) for chunk in group]
            refs[f"scoring endpoint {dp_rank}"] = record.remote(str(file), selections, *refs_of_group)
        return Recording(refs)

    def record_finished(
        self, recording: Recording, *, wait: bool, timeout_s: float | None = None
    ) -> dict[str, FileDigest] | None:
        if not wait and not all_done(recording.refs.values()):
            return None
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        digests = gather(recording.refs, "recording rollouts", limit_s)
        return {name: digest for written in digests.values() for name, digest in written.items()}

    def restore(self, folder: Path, label: str) -> list[PendingScores]:
        files = sorted(str(file.absolute()) for file in folder.glob(f"{label}_group_*.npz"))
        if not files:
            return []
        restored = []
        streaming = {"num_returns": "streaming", "concurrency_group": RECORDS}
        calls = {
            f"scoring endpoint {rank}": endpoint.restore.options(**streaming).remote(
                files, rank, len(self._endpoints), CHUNK_SIZE
            )
            for rank, endpoint in enumerate(self._endpoints)
        }
        for name, items in drain(calls, "restoring rollouts", self._timeout_s).items():
            what = f"restoring rollouts on {name}"
            if len(items) % _PER_CHUNK:  # the last item of a failed call holds its error
                fetch(items[-1], what)
                raise ClusterError(f"{what}: the call ended in the middle of a chunk")
            for i in range(0, len(items), _PER_CHUNK):
                rollouts, scores, sizes, summary = items[i : i + _PER_CHUNK]
                _, chunk = decode_sizes(fetch(sizes, what), rollouts)
                scored = bool(fetch(summary, what))
                restored.append(PendingScores(chunk, scores, summary) if scored else self.submit(chunk))
        return restored


class ScoringPool(RecordedScoring):
    """Implements `gkd.roles.ScoringRole` over endpoints that use the teacher server."""

    def __init__(self, endpoints: Sequence[Any], timeout_s: float) -> None:
        super().__init__(endpoints, timeout_s)
        self._taking: dict[str, Any] = {}  # endpoint -> call whose result has not been read
        self._taken_s = -math.inf

    def take_computations(self, *, wait: bool) -> Mapping[str, Sequence[Computation]]:
        """See `ScoringRole.take_computations`. The endpoints are called every few seconds."""
        batches: dict[str, list[Computation]] = {}
        if wait or (self._taking and all_done(self._taking.values())):
            batches = gather(self._taking, "take_computations", self._timeout_s)
            self._taking = {}
        if not self._taking and (wait or time.monotonic() - self._taken_s > TAKE_EVERY_S):
            self._taken_s = time.monotonic()
            calls = [e.take_computations.options(concurrency_group=RECORDS).remote() for e in self._endpoints]
            self._taking = {f"scoring {dp_rank}": call for dp_rank, call in enumerate(calls)}
        if wait:
            last = gather(self._taking, "take_computations", self._timeout_s)
            self._taking = {}
            batches = {name: [*batches.get(name, ()), *last[name]] for name in last}
        return batches

    def submit(self, chunk: RolloutChunk) -> PendingScores:
        scores, summary = self._endpoints[chunk.dp_rank].score.options(num_returns=2).remote(chunk.ref)
        return PendingScores(chunk, scores, summary)

    def health(self) -> TeacherHealth | None:
        """Return what the endpoints have heard from the teacher server; None without a reply within 2 s. Any thread."""
        refs = [endpoint.health.options(concurrency_group=HEALTH).remote() for endpoint in self._endpoints]
        return TeacherHealth.merged([health for health in answers(refs, _HEALTH_S) if health is not None])


def teacher_heads(endpoints: Sequence[Any], nodes: Sequence[str], timeout_s: float) -> list[Any]:
    """Fetch the teacher's LM head once per node; return the handle of each data-parallel group, by rank.

    No other reference to them exists, so each head is freed as soon as the actor has copied it.
    """
    heads: dict[str, Any] = {}
    fetching: dict[str, Any] = {}
    for i, (endpoint, node) in enumerate(zip(endpoints, nodes, strict=True)):
        if node not in heads:
            heads[node] = fetching[f"scoring endpoint {i}"] = endpoint.lm_head.remote()
    wait_all(fetching, "fetching the teacher's LM head", timeout_s)
    return [heads[node] for node in nodes]
