"""The driver's side of scoring: hand each finished chunk to its data-parallel group's endpoint, collect handles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gkd.cluster.calls import gather
from gkd.roles import RolloutChunk, ScoredChunk
from gkd.teacher.endpoint import ScoreSummary


class ScoringPool:
    """Implements `gkd.roles.ScoringRole` over one endpoint for each data-parallel group."""

    def __init__(self, endpoints: Sequence[Any], timeout_s: float) -> None:
        self._endpoints, self._timeout_s = list(endpoints), timeout_s
        self._pending: list[tuple[RolloutChunk, Any, Any]] = []  # (chunk, ref of the scores, ref of their summary)

    def submit(self, chunk: RolloutChunk) -> None:
        endpoint = self._endpoints[chunk.dp_rank]
        scores, summary = endpoint.score.options(num_returns=2).remote(chunk.ref)
        self._pending.append((chunk, scores, summary))

    def collect(self) -> list[ScoredChunk]:
        """In the order of submission. Forgets what was pending also when it raises."""
        pending, self._pending = self._pending, []
        refs = {
            f"chunk {i} (scoring endpoint {chunk.dp_rank})": summary for i, (chunk, _, summary) in enumerate(pending)
        }
        summaries = gather(refs, "teacher scoring", self._timeout_s).values()
        return [
            ScoredChunk(
                chunk,
                scores,
                None if summary.mass is None else summary.mass / chunk.n_response_tokens,
                summary.n_bytes,
            )
            for (chunk, scores, _), summary in zip(pending, map(ScoreSummary.decode, summaries), strict=True)
        ]
