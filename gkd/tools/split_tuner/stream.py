"""Simulate `trainer.scheduler: stream`: `gkd.pipeline.streaming` and `gkd.rollout.engine_loop` without the work.

The run's own `StreamScheduler` chooses the prompts of each step. An event of the queue is "the next sequence of this
engine is finished"; the loop's own actions come in between, at their own times.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np

from gkd.config.schema_trainer import STREAM
from gkd.pipeline.staleness import StreamScheduler
from gkd.tools.split_tuner.dispatch import assign, room
from gkd.tools.split_tuner.engine import Engine
from gkd.tools.split_tuner.outcome import Outcome, Totals, train_seconds
from gkd.tools.split_tuner.rates import Rates, Sizes, Workload
from gkd.tools.split_tuner.teacher import Teacher

T = TypeVar("T")


def run(
    max_staleness: int, sizes: Sizes, workload: Workload, rates: Rates, *, n_steps: int, warm_up: int, seed: int
) -> Outcome:
    """Simulate `warm_up` steps and then the `n_steps` that are measured."""
    return _Run(max_staleness, sizes, workload, rates, warm_up + n_steps, seed).outcome(warm_up)


class _Run:
    def __init__(
        self, max_staleness: int, sizes: Sizes, workload: Workload, rates: Rates, total_steps: int, seed: int
    ) -> None:
        self._sizes, self._workload, self._rates, self._total_steps = sizes, workload, rates, total_steps
        self._max_staleness = max_staleness
        self._rng = np.random.default_rng(seed)
        # The simulated run is longer than the simulation, so that the stream does not run dry.
        end = total_steps + max_staleness + 1
        self._scheduler = StreamScheduler(self._positions, max_staleness, end, early_parts=workload.early_parts)
        self._version = 0
        self._engines = [Engine(rates, workload.max_num_seqs) for _ in range(sizes.engines)]
        self._events: list[tuple[float, int, int]] = []  # (time, engine, number of its plan)
        self._plans = [0] * sizes.engines  # an event of an older plan is void
        self._queue: deque[int] = deque()  # positions that no engine has yet
        self._waiting: list[deque[int]] = [deque() for _ in range(sizes.engines)]  # positions that have not started
        self._n_held = [0] * sizes.engines  # unfinished sequences of each engine
        self._room = room(workload, sizes.engines)
        self._left: dict[int, int] = {}  # unfinished samples of a position
        self._lengths: dict[int, np.ndarray] = {}
        self._versions: dict[int, int] = {}  # of the weights when a position started
        self._train_s = 0.0  # of the actor
        self._scored_s: dict[int, float] = {}
        self._teacher = Teacher(rates, sizes.workers)
        self.n_events = 0

    def outcome(self, warm_up: int) -> Outcome:
        totals = Totals()
        now_s = began_s = 0.0
        busy_before = self._busy()
        for step in range(self._total_steps):
            if step == warm_up:
                began_s, totals, busy_before = now_s, Totals(), self._busy()
            self._version = step
            self._scheduler.not_started([*self._queue, *chain.from_iterable(self._waiting)], step)
            self._admit(self._scheduler.admit_new(step), now_s)
            from_dataset_s = self._score_dataset(step, now_s)
            finished_s, (early, due) = self._run_until(now_s, partial(self._scheduler.choose, step))
            n_dataset = self._workload.n_prompts - len(self._positions(step))
            trained_s = self._train(totals, early, n_dataset, now_s, finished_s, from_dataset_s, completes=not due)
            late = due
            while late:
                late_s, (part, late) = self._run_until(trained_s, partial(self._scheduler.split, late))
                trained_s = self._train(totals, part, 0, trained_s, late_s, 0.0, completes=not late)
            self._count(totals, step, [*early, *due], n_dataset)
            self._scheduler.remove([*early, *due])
            for position in [*early, *due]:
                del self._scored_s[position], self._lengths[position], self._versions[position]
            now_s = self._sync(trained_s) + self._rates.other_s
            self._run_events(now_s)
        busy = self._busy()
        busy_s = {pool: busy[pool] - busy_before[pool] for pool in busy}
        return totals.outcome(STREAM, now_s - began_s, busy_s, self._sizes)

    def _positions(self, batch: int) -> range:
        start = batch * self._workload.n_prompts
        return range(start, start + self._workload.on_policy(batch))

    def _busy(self) -> dict[str, float]:
        return {
            "rollout": sum(e.busy_s for e in self._engines),
            "teacher": self._teacher.busy_s,
            "actor": self._train_s,
        }

    def _admit(self, positions: Sequence[int], now_s: float) -> None:
        """Queue the prompts, and start what fits."""
        if not positions:
            return
        n = self._workload.n
        lengths = self._workload.lengths.draw(self._rng, len(positions) * n, self._version).reshape(-1, n)
        for position, drawn in zip(positions, lengths, strict=True):
            self._lengths[position] = drawn
        self._queue.extend(positions)
        for engine in self._assign(range(len(self._engines))):
            if self._engines[engine].n_running < self._workload.max_num_seqs:
                self._engines[engine].run_to(now_s)
                self._begin(engine)

    def _assign(self, engines: Sequence[int]) -> list[int]:
        """Give the prompts of the queue to those of these engines that have room; return the engines with new ones."""
        given = assign(self._queue, self._n_held, self._room, self._workload.n, engines)
        for position, engine in given:
            self._waiting[engine].append(position)
        return sorted({engine for _, engine in given})

    def _begin(self, number: int) -> None:
        """Start prompts while there is room, at the end of a pass, and plan the next event."""
        engine, waiting = self._engines[number], self._waiting[number]
        while waiting and engine.n_running + engine.n_waiting < self._workload.max_num_seqs:
            position = waiting.popleft()
            self._versions[position] = self._version
            self._left[position] = self._workload.n
            engine.add(position, self._lengths[position].tolist(), self._workload.prompt_tokens)
        engine.begin()
        self._plan(number)

    def _plan(self, number: int) -> None:
        self._plans[number] += 1
        next_s = self._engines[number].next_finish_s()
        if next_s < math.inf:
            heapq.heappush(self._events, (next_s, number, self._plans[number]))

    def _run_event(self) -> None:
        _, number, plan = heapq.heappop(self._events)
        if plan != self._plans[number]:
            return
        self.n_events += 1
        self._finish_now(number)
        self._begin(number)

    def _run_events(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self._run_event()

    def _finish(self, position: int, at_s: float) -> None:
        del self._left[position]
        self._scheduler.finish(position, self._versions[position])
        tokens = self._lengths[position] + self._workload.prompt_tokens
        self._scored_s[position] = self._teacher.score(at_s, tokens.tolist())

    def _run_until(self, now_s: float, found: Callable[[], T | None]) -> tuple[float, T]:
        """Run until this returns a value; return (that time, the value)."""
        ready_s = now_s
        while (value := found()) is None:
            ready_s = max(ready_s, self._events[0][0])
            self._run_event()
        return ready_s, value

    def _train(
        self,
        totals: Totals,
        positions: list[int],
        n_dataset: int,
        now_s: float,
        finished_s: float,
        from_dataset_s: float,
        *,
        completes: bool,
    ) -> float:
        """Train on a part of a batch, and return the time when that is done.

        Args:
            now_s: when the loop began to wait for it.
            finished_s: when its last response was complete.
            from_dataset_s: when its dataset responses were scored.
            completes: the optimizer step follows.
        """
        scored_s = max([finished_s, from_dataset_s, *(self._scored_s[p] for p in positions)])
        tokens, groups = self._batch(positions, n_dataset)
        train_s = train_seconds(tokens, groups, self._sizes, self._workload, self._rates)
        train_s -= 0.0 if completes else self._rates.train_s
        self._run_events(scored_s + train_s)
        self._train_s += train_s
        for pool, waited_s in (("rollout", finished_s - now_s), ("teacher", scored_s - finished_s), ("actor", train_s)):
            totals.waited_s[pool] += waited_s
        return scored_s + train_s

    def _score_dataset(self, step: int, now_s: float) -> float:
        n = self._workload.n_prompts - len(self._positions(step))
        tokens = self._workload.prompt_tokens + self._workload.dataset_tokens
        return self._teacher.score(now_s, [tokens] * n) if n else now_s

    def _batch(self, positions: list[int], n_dataset: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, data-parallel group) of each sequence."""
        w, dp = self._workload, self._sizes.dp
        lengths = np.concatenate([self._lengths[p] for p in positions]) if positions else np.zeros(0)
        tokens = np.concatenate([lengths + w.prompt_tokens, np.full(n_dataset, w.prompt_tokens + w.dataset_tokens)])
        groups = np.concatenate([np.array(positions, int).repeat(w.n) % dp, np.arange(n_dataset) % dp])
        return tokens, groups

    def _count(self, totals: Totals, step: int, positions: list[int], n_dataset: int) -> None:
        w = self._workload
        totals.n_steps += 1
        totals.response_tokens += sum(float(self._lengths[p].sum()) for p in positions) + n_dataset * w.dataset_tokens
        for position in positions:
            totals.ages[step - self._versions[position]] += w.n

    def _sync(self, trained_s: float) -> float:
        """Stop all engines between two passes, transfer the weights, and return the time when all have them."""
        for number, engine in enumerate(self._engines):
            engine.run_to(trained_s)
            if engine.next_finish_s() <= engine.at_s:  # its last pass before the stop finishes a sequence
                self._finish_now(number)
        done_s = max(engine.at_s for engine in self._engines) + self._rates.sync_s
        self._version += 1
        for number, engine in enumerate(self._engines):
            engine.hold(done_s)
            self._begin(number)
        return done_s

    def _finish_now(self, number: int) -> None:
        engine = self._engines[number]
        for position in engine.run_to_finish():
            self._left[position] -= 1
            self._n_held[number] -= 1
            if not self._left[position]:
                self._finish(position, engine.at_s)
        self._assign([number])
