"""The driver's side of scoring: hand each finished chunk to its data-parallel group's endpoint, collect handles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gkd.cluster.calls import gather
from gkd.roles import RolloutChunk, ScoredChunk


class ScoringPool:
    """Implements `gkd.roles.ScoringRole` over one endpoint for each data-parallel group."""

    def __init__(self, endpoints: Sequence[Any], timeout_s: float) -> None:
        self._endpoints, self._timeout_s = list(endpoints), timeout_s
        self._pending: dict[str, Any] = {}

    def submit(self, chunk: RolloutChunk) -> None:
        name = f"chunk {len(self._pending)} (scoring endpoint {chunk.dp_rank})"
        self._pending[name] = self._endpoints[chunk.dp_rank].score.remote(chunk)

    def collect(self) -> list[ScoredChunk]:
        """In the order of submission. Forgets what was pending also when it raises."""
        pending, self._pending = self._pending, {}
        return list(gather(pending, "teacher scoring", self._timeout_s).values())
