"""Rollout engines on a simulated clock, which moves only while the driver waits. Their chunks are the product's."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from gkd.data.chunks import encode_sizes
from gkd.data.codec import decode_prompts
from gkd.rollout.engine.loop import Coalescer
from gkd.rollout.messages import Job
from gkd.types import EngineUsage, RolloutChunk
from tests.bench.simulated_ray import Apparatus, Ref

_TICK_S = 0.25


class _Finished(NamedTuple):
    sample_index: int
    n_tokens: int
    version: int


@dataclass
class Workload:
    n: int  # samples per prompt
    n_running: int  # sequences per engine
    n_prompt: int  # tokens
    mean_tokens: float
    max_tokens: int
    token_s: float


class Engine:
    """Each of its sequences takes `token_s` per token, and starts when another one has finished."""

    def __init__(self, workload: Workload, seed: int, apparatus: Apparatus) -> None:
        self._workload, self._apparatus, self._rng = workload, apparatus, np.random.default_rng(seed)
        self._arrived: deque[tuple[Job, bytes]] = deque()
        self._backlog: deque[int] = deque()  # prompt indices
        self._samples = self._lengths = self._versions = np.zeros(0, np.int64)  # of the running sequences
        self._ends_s = np.zeros(0)
        self._results: SimpleQueue[bytes | None] = SimpleQueue()
        self._handled = threading.Semaphore(0)
        self._job: Job | None = None
        self.n_chunks = self.n_finished = 0
        self.idle_s = 0.0  # sum over its slots

    def open_stream(self, session: int, n_groups: int, chunk_size: int) -> None:
        self._chunks = Coalescer(n_groups, chunk_size)

    def admit(self, session: int, job: Job, encoded: bytes, first: bool) -> None:
        self._arrived.append((job, encoded))

    def waiting(self, session: int, job_id: int) -> bytes:
        return np.array(self._backlog, np.int32).tobytes()

    def stream(self) -> Iterator[Ref]:
        is_first = True
        while True:
            if not is_first:
                self._handled.release()  # the driver has handled the last chunk
            sizes = self._results.get()
            if sizes is None:
                return
            is_first = False
            yield Ref(partial(_n_sequences, sizes))
            yield Ref(partial(bytes, sizes))

    def close_stream(self) -> None:
        self._results.put(None)

    def usage(self) -> EngineUsage:
        return EngineUsage(9.0)

    def advance(self, now_s: float, version: int) -> int:
        """Move the clock, and send the chunks that are due; return their number."""
        work = self._workload
        while self._arrived:
            self._job, encoded = self._arrived.popleft()
            self._backlog.extend(decode_prompts(encoded)[1])
        job = self._job
        if job is None:
            return 0
        done = self._ends_s <= now_s
        if done.any():
            rows = zip(self._samples[done].tolist(), self._lengths[done].tolist(), self._versions[done].tolist(),
                       strict=True)  # fmt: skip
            for row in rows:
                self._chunks.add(job, _Finished(*row), now_s)  # type: ignore[arg-type]
            self._keep(~done)
        n_new = min(len(self._backlog), -(-(work.n_running - len(self._samples)) // work.n))
        if n_new > 0:
            prompts = np.array([self._backlog.popleft() for _ in range(n_new)])
            self._start((prompts[:, None] * work.n + np.arange(work.n)).ravel(), now_s, version)
        self.idle_s += _TICK_S * max(0, 1 - len(self._samples) / work.n_running)
        n_sent = 0
        for number, group, rollouts in self._chunks.due(now_s, flush=not len(self._samples)):
            self._results.put(_encoded(number, group, rollouts, work.n_prompt))
            n_sent += 1
            self.n_finished += len(rollouts)
        self.n_chunks += n_sent
        return n_sent

    def wait_handled(self, n_chunks: int) -> None:
        """Wait until the driver has handled this many chunks."""
        for _ in range(n_chunks):
            self._handled.acquire()

    def _start(self, samples: np.ndarray, now_s: float, version: int) -> None:
        work = self._workload
        lengths = np.minimum(self._rng.geometric(1 / work.mean_tokens, len(samples)), work.max_tokens)
        self._samples = np.concatenate((self._samples, samples))
        self._lengths = np.concatenate((self._lengths, lengths))
        self._versions = np.concatenate((self._versions, np.full(len(samples), version)))
        self._ends_s = np.concatenate((self._ends_s, now_s + lengths * work.token_s))

    def _keep(self, kept: np.ndarray) -> None:
        self._samples, self._lengths = self._samples[kept], self._lengths[kept]
        self._versions, self._ends_s = self._versions[kept], self._ends_s[kept]


class Clock:
    """Moves all engines in a thread of its own, while the driver is in `waiting` or `sleep`."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines, self.version, self.now_s, self.cpu_s = engines, 0, 0.0, 0.0
        self.error: BaseException | None = None
        self._n_waiting = 0
        self._alarm_s: float | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="clock", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The driver waits for the engines."""
        with self._changed:
            self._n_waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._n_waiting -= 1

    def sleep(self, duration_s: float) -> None:
        """Wait for a time on this clock."""
        with self._changed:
            self._alarm_s = self.now_s + duration_s
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.error or self._alarm_s is None)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._n_waiting or self._alarm_s is not None)
                    self.now_s += _TICK_S
                for engine in self.engines:  # one after the other: at 80 chunks per second few come together
                    engine.wait_handled(engine.advance(self.now_s, self.version))
                self.cpu_s = time.thread_time()
                with self._changed:
                    if self._alarm_s is not None and self.now_s >= self._alarm_s:
                        self._alarm_s = None
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()


def _encoded(job: int, group: int, rollouts: list[Any], n_prompt: int) -> bytes:
    """Return what an engine sends of a chunk; every response has one turn."""
    sizes = np.zeros((8, len(rollouts)), "<i4")
    sizes[0], lengths, versions = np.array(rollouts).T
    sizes[1], sizes[2], sizes[4], sizes[7] = lengths + n_prompt, lengths, versions, 1
    return encode_sizes(RolloutChunk(group, None, sizes), job)


def _n_sequences(sizes: bytes) -> int:
    """Return what stands for the rollouts of a chunk."""
    return int(np.frombuffer(sizes, "<i4", 3)[2])
