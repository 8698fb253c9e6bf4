"""Ray and the rollout engines of `bench_driver_scale`: objects of this process on a simulated clock.

The pools of the product call them as Ray actors; the handle of a result is a function that returns it, and may block.
The clock moves only while the driver waits. Chunks are the product's.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from gkd.cluster import calls
from gkd.data.chunks import encode_sizes
from gkd.rollout.engine.loop import Coalescer
from gkd.rollout.messages import Job, decode_prompts
from gkd.types import EngineUsage, RolloutChunk, SyncReport

_TICK_S = 0.25


Ref = Callable[[], Any]


class SimulatedRay:
    """Stands for the module `ray` in `gkd.cluster.calls`, and counts the calls of each method."""

    def __init__(self) -> None:
        self.cpu_s = 0.0  # of the objects that stand for other processes, over all threads
        self.n_calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        calls.ray = self  # type: ignore[assignment]

    def wait(self, refs: Sequence[Ref], *, num_returns: int = 1, **_: Any) -> tuple[list[Ref], list[Ref]]:
        return list(refs[:num_returns]), list(refs[num_returns:])

    def get(self, ref: Ref) -> Any:
        return ref()

    def call(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        began_s = time.thread_time()
        result = method(*args, **kwargs)
        with self._lock:
            self.n_calls[method.__name__] += 1
            self.cpu_s += time.thread_time() - began_s
        return result


class Handle:
    """An actor's handle."""

    def __init__(self, ray: SimulatedRay, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._ray, getattr(self._actor, name))


class _Method:
    def __init__(self, ray: SimulatedRay, method: Callable[..., Any], num_returns: Any = 1) -> None:
        self._ray, self._method, self._num_returns = ray, method, num_returns

    def options(self, *, num_returns: int | str = 1, **_: Any) -> _Method:
        return _Method(self._ray, self._method, num_returns)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        result = self._ray.call(self._method, args, kwargs)
        if self._num_returns == 2:
            return tuple((lambda value=one: value) for one in result)
        return result if callable(result) or self._num_returns == "streaming" else lambda: result


N, N_RUNNING, N_PROMPT = 8, 256, 200  # samples of a prompt; sequences of an engine; tokens of a prompt
MEAN_TOKENS, MAX_TOKENS = 400.0, 1024  # of a response


class _Finished(NamedTuple):
    sample_index: int
    n_tokens: int
    version: int


class Engine:
    """Each of its sequences takes `token_s` per token, and starts when another one has finished."""

    def __init__(self, token_s: float, seed: int) -> None:
        self._token_s, self._rng = token_s, np.random.default_rng(seed)
        self._backlog: deque[int] = deque()  # prompt indices
        self._running = np.zeros((3, 0), np.int64)  # rows of `_Finished`
        self._ends_s = np.zeros(0)
        self._results: SimpleQueue[bytes | None] = SimpleQueue()
        self._handled = threading.Semaphore(0)
        self._job: Job | None = None
        self.n_chunks = 0

    def open_stream(self, session: int, n_groups: int, chunk_size: int) -> None:
        self._chunks = Coalescer(n_groups, chunk_size)

    def admit(self, session: int, job: Job, encoded: bytes, first: bool) -> None:
        self._job = job
        self._backlog.extend(decode_prompts(encoded)[1])

    def waiting(self, session: int, job_id: int) -> bytes:
        return np.array(self._backlog, np.int32).tobytes()

    def stream(self) -> Iterator[Ref]:
        while (sizes := self._results.get()) is not None:
            yield partial(int, np.frombuffer(sizes, "<i4", 3)[2])  # the number of sequences stands for them
            yield partial(bytes, sizes)
            self._handled.release()  # the driver has handled the chunk

    def close_stream(self) -> None:
        self._results.put(None)

    def usage(self) -> EngineUsage:
        return EngineUsage(9.0)

    def texts(self, *_: Any) -> list[Any]:
        return []

    def advance(self, now_s: float, version: int) -> None:
        """Move the clock, and wait until the driver has handled the chunks that are due."""
        if self._job is None:
            return
        done = self._ends_s <= now_s
        for row in self._running[:, done].T.tolist():
            self._chunks.add(self._job, _Finished(*row), now_s)  # type: ignore[arg-type]
        self._running, self._ends_s = self._running[:, ~done], self._ends_s[~done]
        n_new = min(len(self._backlog), -(-(N_RUNNING - len(self._ends_s)) // N))
        if n_new > 0:
            self._start([self._backlog.popleft() for _ in range(n_new)], now_s, version)
        for number, group, rollouts in self._chunks.due(now_s, flush=not len(self._ends_s)):
            self._results.put(_encoded(number, group, rollouts))
            self.n_chunks += 1
            self._handled.acquire()

    def _start(self, prompts: list[int], now_s: float, version: int) -> None:
        samples = (np.array(prompts)[:, None] * N + np.arange(N)).ravel()
        lengths = np.minimum(self._rng.geometric(1 / MEAN_TOKENS, len(samples)), MAX_TOKENS)
        started = np.stack((samples, lengths, np.full(len(samples), version)))
        self._running = np.concatenate((self._running, started), axis=1)
        self._ends_s = np.concatenate((self._ends_s, now_s + lengths * self._token_s))


class Clock:
    """Moves all engines in a thread of its own, while the driver waits."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines, self.version, self.now_s, self.cpu_s = engines, 0, 0.0, 0.0
        self.is_waiting = False  # the driver waits for the engines
        self._alarm_s, self._rang = math.inf, threading.Event()
        threading.Thread(target=self._run, name="clock", daemon=True).start()

    def push(self, policy_version: int) -> SyncReport:
        """Synchronize no weights, only their version."""
        self.version = policy_version
        return SyncReport(8, 0)

    def sleep(self, duration_s: float) -> None:
        """Wait for a time on this clock."""
        self._rang.clear()
        self._alarm_s = self.now_s + duration_s
        if not self._rang.wait(60.0):
            raise RuntimeError("the simulated clock has stopped: see the error of its thread")

    def _run(self) -> None:
        while True:
            if not self.is_waiting and self._alarm_s == math.inf:
                time.sleep(0.001)
                continue
            self.now_s += _TICK_S
            for engine in self.engines:  # one after the other: at 80 chunks per second few come together
                engine.advance(self.now_s, self.version)
            self.cpu_s = time.thread_time()
            if self.now_s >= self._alarm_s:
                self._alarm_s = math.inf
                self._rang.set()


def _encoded(job: int, group: int, rollouts: list[Any]) -> bytes:
    """Return what an engine sends of a chunk; every response has one turn."""
    sizes = np.zeros((8, len(rollouts)), "<i4")
    sizes[0], lengths, versions = np.array(rollouts).T
    sizes[1], sizes[2], sizes[4], sizes[7] = lengths + N_PROMPT, lengths, versions, 1
    return encode_sizes(RolloutChunk(group, None, sizes), job)
