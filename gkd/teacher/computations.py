"""Note from the teacher server's replies what its workers computed, for the trace of a run."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from gkd.handles import Computation
from teacher_server.wire.protocol import RowsReply, ScoreReply

_MOST = 5000  # batches between two calls of `take`; older ones are dropped


class Computations:
    """Batches whose replies arrived since the last `take`. Thread-safe; the connections' threads call `note`."""

    def __init__(self) -> None:
        self._batches: dict[tuple[str, float], Computation] = {}
        self._lock = threading.Lock()

    def note(self, reply: ScoreReply | RowsReply, n_sequences: int, *, route: str = "") -> None:
        """Note a reply; all replies of one batch have the same worker and compute_s.

        Args:
            n_sequences: that are complete with this reply.
            route: of several teachers, whose workers may have equal names.
        """
        worker = f"{route} {reply.worker}".lstrip()
        key = worker, reply.compute_s
        with self._lock:
            known = self._batches.get(key)
            if known is not None:
                self._batches[key] = replace(known, n_sequences=known.n_sequences + n_sequences)
                return
            self._batches[key] = Computation(worker, time.time(), reply.queue_s, reply.compute_s, n_sequences)
            if len(self._batches) > _MOST:
                del self._batches[next(iter(self._batches))]

    def take(self) -> list[Computation]:
        """Return and forget the batches, in the order of their first replies."""
        with self._lock:
            batches, self._batches = self._batches, {}
        return list(batches.values())
