"""Measure from the driver how busy the teacher was; the split tuner derives the rate of one worker from it.

A teacher of n workers is fully busy while n or more requests are open, whichever step they belong to. So the meter
measures a time window in which all requests are known. The driver learns of a request with its batch, and requests
submitted before the weights of step s are pushed belong to batches up to step s + staleness bound.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from gkd.metrics.bottleneck import WORKERS, busy_name
from gkd.types import ScoredChunk

SEQUENCES = "perf/teacher_sequences"  # completed in the window
TOKENS = "perf/teacher_tokens"  # tokens of these sequences: the student's prompt and response


class TeacherMeter:
    """Receives scored batches, and returns once per step how busy the teacher was in an earlier step.

    Args:
        delay: steps until all requests of a window are known: the scheduler's staleness bound.
        clock: the clock of `ScoreTimes`.
    """

    def __init__(self, delay: int, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=delay + 2)  # ends of the last steps, before their weights were pushed
        self._requests = np.zeros((3, 0))  # [3, sequences]: submitted_s, completed_s, tokens

    def add(self, batch: Sequence[ScoredChunk]) -> None:
        """Add scores that have arrived. Scores from a checkpoint have no times and are ignored."""
        timed = [(c.times, c.rollouts) for c in batch if c.times is not None]
        if not timed:
            return
        submitted_s = np.repeat([times.submitted_s for times, _ in timed], [chunk.n_sequences for _, chunk in timed])
        completed_s = np.concatenate([times.completed_s for times, _ in timed])
        n_tokens = np.concatenate([chunk.n_tokens for _, chunk in timed])
        new = np.stack([submitted_s, completed_s, n_tokens])
        self._requests = np.concatenate([self._requests, new], axis=1)

    def end_step(self) -> dict[str, float]:
        """End a step; the first call starts the first one. Call it before the engines get new weights.

        Returns:
            For the step that ended `delay` steps ago: the busy seconds of a teacher with 1, 2, 4, ... workers, i.e. the
            integral of min(open requests, workers), and what was completed. Empty if there is no such step yet, or no
            request was open in it.
        """
        self._ends.append(self._clock())
        if len(self._ends) < (self._ends.maxlen or 0):
            return {}
        begin_s, end_s = self._ends[0], self._ends[1]
        submitted, completed, tokens = self._requests
        self._requests = self._requests[:, completed > end_s]
        was_open = (submitted < end_s) & (completed > begin_s)
        if not was_open.any():
            return {}
        done = was_open & (completed <= end_s)
        numbers = {SEQUENCES: float(done.sum()), TOKENS: float(tokens[done].sum())}
        return numbers | _busy(np.maximum(submitted[was_open], begin_s), np.minimum(completed[was_open], end_s))


def _busy(submitted: np.ndarray, completed: np.ndarray) -> dict[str, float]:
    """Return the busy seconds by number of workers, up to the largest number of requests open at a time."""
    at = np.concatenate([submitted, completed])
    order = np.argsort(at, kind="stable")
    n_open = np.cumsum(np.repeat([1, -1], len(submitted))[order])[:-1]
    lasted_s = np.diff(at[order])
    most = int(n_open.max())
    return {
        busy_name(n): float(np.minimum(n_open, n) @ lasted_s)
        for i, n in enumerate(WORKERS)
        if i == 0 or WORKERS[i - 1] < most
    }
