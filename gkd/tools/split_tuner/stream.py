"""Simulate `trainer.scheduler: stream`: `gkd.pipeline.streaming` and `gkd.rollout.engine_loop` without the work.

The run's own `StreamScheduler` chooses the prompts of each step. An event of the queue is "the next sequence of this
engine is finished"; the loop's own actions come in between, at their own times.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from gkd.config.schedulers import STREAM
from gkd.pipeline.staleness import StreamScheduler
from gkd.tools.split_tuner.dispatch import assign, room
from gkd.tools.split_tuner.engine import Engine
from gkd.tools.split_tuner.outcome import Outcome, Totals, train_seconds
from gkd.tools.split_tuner.rates import Rates, Sizes, Workload
from gkd.tools.split_tuner.teacher import Teacher


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
        self._scheduler = StreamScheduler(self._positions, max_staleness, total_steps + max_staleness + 1)
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
        self._open: Counter[int] = (
            Counter()
        )  # unfinished positions, by the version of the weights they were given under
        self._given: dict[int, int] = {}
        self._n_finished = 0  # and not taken
        self._scored_s: dict[int, float] = {}
        self._teacher = Teacher(rates, sizes.workers)
        self.n_events = 0

    def outcome(self, warm_up: int) -> Outcome:
        totals, rates = Totals(), self._rates
        now_s = began_s = 0.0
        busy_before = self._busy(0.0)
        train_total_s = 0.0
        for step in range(self._total_steps):
            if step == warm_up:
                began_s, totals, busy_before, train_total_s = now_s, Totals(), self._busy(0.0), 0.0
            self._version = step
            self._admit(self._scheduler.admit_new(step), now_s)
            from_dataset_s = self._score_dataset(step, now_s)
            finished_s = self._run_until_batch(step, now_s)
            chosen = self._scheduler.choose(step)
            assert chosen is not None, f"step {step}: the scheduler waits for more than the simulation"
            scored_s = max(finished_s, from_dataset_s, *(self._scored_s[p] for p in chosen))
            tokens, groups = self._batch(step, chosen)
            train_s = train_seconds(tokens, groups, self._sizes, self._workload, rates)
            trained_s = scored_s + train_s
            self._run_events(trained_s)
            self._count(totals, step, chosen, finished_s - now_s, scored_s - finished_s, train_s)
            train_total_s += train_s
            self._scheduler.remove(chosen)
            self._n_finished -= len(chosen)
            for position in chosen:
                del self._scored_s[position], self._lengths[position], self._given[position], self._versions[position]
            now_s = self._sync(trained_s) + rates.other_s
            self._run_events(now_s)
        busy = self._busy(train_total_s)
        busy_s = {pool: busy[pool] - busy_before[pool] for pool in busy}
        return totals.outcome(STREAM, now_s - began_s, busy_s, self._sizes)

    def _positions(self, batch: int) -> range:
        start = batch * self._workload.n_prompts
        return range(start, start + self._workload.on_policy(batch))

    def _busy(self, train_s: float) -> dict[str, float]:
        return {"rollout": sum(e.busy_s for e in self._engines), "teacher": self._teacher.busy_s, "actor": train_s}

    def _admit(self, positions: Sequence[int], now_s: float) -> None:
        """Queue the prompts, and start what fits."""
        if not positions:
            return
        n = self._workload.n
        lengths = self._workload.lengths.draw(self._rng, len(positions) * n, self._version).reshape(-1, n)
        for position, drawn in zip(positions, lengths, strict=True):
            self._lengths[position], self._given[position] = drawn, self._version
        self._open[self._version] += len(positions)
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
        self._open[self._given[position]] -= 1
        self._n_finished += 1
        tokens = self._lengths[position] + self._workload.prompt_tokens
        self._scored_s[position] = self._teacher.score(at_s, tokens.tolist())

    def _run_until_batch(self, step: int, now_s: float) -> float:
        """Run until the step has its batch, and return that time.

        The condition is that of `StreamScheduler`, from counts alone: of the prompts due within k steps no more may be
        unfinished than these k steps take.
        """
        ready_s = now_s
        while not self._is_ready(step):
            ready_s = max(ready_s, self._events[0][0])
            self._run_event()
        return ready_s

    def _is_ready(self, step: int) -> bool:
        if self._n_finished < len(self._positions(step)):
            return False
        room = unfinished = 0
        open_by_due = sorted((version + self._max_staleness, n) for version, n in self._open.items() if n)
        for last in range(step, step + self._max_staleness + 1):
            room += len(self._positions(last)) if last > step else 0
            unfinished = sum(n for due, n in open_by_due if due <= last)
            if unfinished > room:
                return False
        return True

    def _score_dataset(self, step: int, now_s: float) -> float:
        n = self._workload.n_prompts - len(self._positions(step))
        tokens = self._workload.prompt_tokens + self._workload.dataset_tokens
        return self._teacher.score(now_s, [tokens] * n) if n else now_s

    def _batch(self, step: int, chosen: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, data-parallel group) of each sequence."""
        w, dp = self._workload, self._sizes.dp
        n_dataset = w.n_prompts - len(self._positions(step))
        lengths = np.concatenate([self._lengths[p] for p in chosen]) if chosen else np.zeros(0)
        tokens = np.concatenate([lengths + w.prompt_tokens, np.full(n_dataset, w.prompt_tokens + w.dataset_tokens)])
        groups = np.concatenate([np.array(chosen, int).repeat(w.n) % dp, np.arange(n_dataset) % dp])
        return tokens, groups

    def _count(
        self, totals: Totals, step: int, chosen: list[int], rollout_s: float, teacher_s: float, train_s: float
    ) -> None:
        w = self._workload
        for pool, waited_s in (("rollout", rollout_s), ("teacher", teacher_s), ("actor", train_s)):
            totals.waited_s[pool] += waited_s
        n_dataset = w.n_prompts - len(self._positions(step))
        totals.n_steps += 1
        totals.response_tokens += sum(float(self._lengths[p].sum()) for p in chosen) + n_dataset * w.dataset_tokens
        for position in chosen:
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
