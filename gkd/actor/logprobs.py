"""Driver side of the student's logprobs: a handle of calls on the actor's ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gkd.actor.frozen.pools import PartialResults
from gkd.cluster.calls import Pending, fetch
from gkd.data.scatter import gather_results


class PendingLogprobs:
    """Logprobs of a batch that are being computed.

    Args:
        calls: on all ranks.
        parts: of each chunk.
    """

    def __init__(self, calls: Pending, parts: Sequence[PartialResults]) -> None:
        self._calls, self._parts = calls, list(parts)

    def wait(self, timeout_s: float | None = None) -> list[list[np.ndarray]]:
        """Return for each chunk, in its order, [R] float32 of each sequence. May be repeated.

        Raises as `Pending.wait`.
        """
        self._calls.wait(timeout_s)
        results = [(part.sequence_indices, [fetch(ref, "logprobs") for ref in part.refs]) for part in self._parts]
        return [[one for one in gather_results(*parts) if one is not None] for parts in results]
