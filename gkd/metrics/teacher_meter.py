"""Measure from the driver how much work the teacher had: `gkd.tools.split_tuner` needs the rate of one worker.

A worker is at work while as many questions are open as there are workers, whichever step they belong to. So what counts
is a time, not a batch: one in which all questions are known. The driver hears of a question with the batch that it is
in, and what was asked before the weights of step s are pushed is in the batches up to step s + bound on staleness.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from gkd.handles import ScoredChunk
from gkd.metrics.pools import WORKERS, busy_name

SEQUENCES = "perf/teacher_sequences"  # answered in the window
TOKENS = "perf/teacher_tokens"  # of these, prompt and response


class TeacherMeter:
    """Questions go in with their batches; out comes, once a step, what the teacher did in a step of the past.

    Args:
        delay: steps until nothing that was asked can still be unknown: the scheduler's bound on staleness.
        clock: as of `ScoreTimes`.
    """

    def __init__(self, delay: int, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=delay + 2)  # of the last steps, before each one's weights were pushed
        self._questions = np.zeros((3, 0))  # (asked, answered, tokens) of each sequence

    def add(self, batch: Sequence[ScoredChunk]) -> None:
        """Scores that have come; those of a checkpoint have no times and are no work."""
        new = [
            np.stack([np.full(len(c.times.completed_s), c.times.submitted_s), c.times.completed_s, c.rollouts.n_tokens])
            for c in batch
            if c.times is not None
        ]
        self._questions = np.concatenate([self._questions, *new], axis=1)

    def end_step(self) -> dict[str, float]:
        """A step ends now, or (the first call) the first one begins. Call it before the engines get new weights.

        Returns:
            Of the step that ended `delay` steps before: seconds of work for a teacher of 1, 2, 4 ... workers, that is
            the integral of min(open questions, workers) over its time, and what was answered in it. Nothing while
            there is none, and where nothing was open.
        """
        self._ends.append(self._clock())
        if len(self._ends) < (self._ends.maxlen or 0):
            return {}
        begin_s, end_s = self._ends[0], self._ends[1]
        asked, answered, tokens = self._questions
        self._questions = self._questions[:, answered > end_s]
        was_open = (asked < end_s) & (answered > begin_s)
        if not was_open.any():
            return {}
        done = was_open & (answered <= end_s)
        numbers = {SEQUENCES: float(done.sum()), TOKENS: float(tokens[done].sum())}
        return numbers | _busy(np.maximum(asked[was_open], begin_s), np.minimum(answered[was_open], end_s))


def _busy(asked: np.ndarray, answered: np.ndarray) -> dict[str, float]:
    """Seconds of work for so many workers; no more than questions were open at a time."""
    at = np.concatenate([asked, answered])
    order = np.argsort(at, kind="stable")
    n_open = np.cumsum(np.repeat([1, -1], len(asked))[order])[:-1]
    lasted_s = np.diff(at[order])
    most = int(n_open.max())
    return {
        busy_name(n): float(np.minimum(n_open, n) @ lasted_s)
        for i, n in enumerate(WORKERS)
        if i == 0 or WORKERS[i - 1] < most
    }
