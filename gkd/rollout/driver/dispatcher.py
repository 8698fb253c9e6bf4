"""Driver side of all rollouts: one queue of prompts, from which each engine gets its next ones as it finishes others.

    jobs: a batch (`RolloutPool.generate`), a stream, or both     admit -> queue
    engine with room        <- the next prompts of the queue, of one data-parallel group as far as possible
    engine's chunks         -> the job that admitted the prompts
    engine that died        -> its unfinished prompts go back to the head of the queue

An engine has room while it holds fewer sequences than it can run, and a small reserve. So the engine that is free
first takes the next prompt. Which engine answers does not change the tokens. Streams are open while there is a job.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from gkd.cluster.calls import answers, fetch, gather
from gkd.config.schema import Config
from gkd.data.chunks import chunk_size, decode_sizes, linger_s, part_of, reserve_size
from gkd.errors import ClusterError, GkdError, RankFailed
from gkd.log import get_logger
from gkd.rollout.driver.recovery import Engines
from gkd.rollout.messages import Job, Sampling, encode_prompts
from gkd.types import Prompt, RolloutChunk

log = get_logger("rollout_stream")
_WAITING_S = 1.0


def name_of(engine: int) -> str:
    return f"rollout engine {engine}"


@dataclass(slots=True)
class _Engine:
    """The open stream of one process."""

    index: int
    worker: Any
    admit: Any  # its remote method
    n_sequences: int = 0  # sequences assigned and not yet returned
    lane: Lane | None = None  # lane of its last prompt
    held: dict[tuple[int, int], Waiting] = field(default_factory=dict)  # (job, prompt index) -> unfinished prompt
    reader: threading.Thread = field(init=False)


class Dispatcher:
    """Assigns the prompts of all jobs to the engines, of which none has an open stream. Thread-safe."""

    def __init__(self, engines: Engines, config: Config, n_groups: int) -> None:
        self._engines = engines
        self._config = config
        self._n_groups = n_groups
        self._timeout_s = config.trainer.stage_timeout_s
        self._n_sequences = config.trainer.global_batch_size * config.rollout.n
        self._chunk_size = chunk_size(config)
        n_engines = len(engines.up())
        self._is_only = n_engines == 1  # it gets all prompts at once
        most = config.rollout.sequence_limit
        self._room = math.inf if self._is_only else most + reserve_size(most, self._n_sequences, n_engines)
        self._changing = threading.Lock()  # one session is opened or closed at a time; taken before the next lock
        self._lock = threading.Lock()  # guards all below
        self._queue = PromptQueue(n_groups, self._window())
        self._jobs: dict[int, JobStream] = {}
        self._open: dict[int, _Engine] = {}  # engine index -> its open stream
        self._n_jobs = self._session = 0
        self._error: Exception | None = None  # first error of the current session
        engines.on_up(self._engines_changed)

    def start(self, sampling: Sampling, *, lingers: bool, first: bool = False) -> JobStream:
        """Start a job; open the engines' streams if it is the only one.

        Args:
            lingers: chunks leave soon, in proportion to the batch, before they are full; with several engines always.
            first: its prompts go before the prompts of other jobs.

        Raises:
            GkdError: an engine's stream could not be opened.
        """
        with self._changing:
            waits_s = linger_s(self._n_sequences, soon=lingers or not self._is_only)
            with self._lock:
                self._n_jobs += 1
                is_only = not self._jobs
                stream = JobStream(self, Job(self._n_jobs, sampling, waits_s), first=first)
                self._jobs[self._n_jobs] = stream
                if is_only:
                    self._session = self._session + 1
                    self._error = None
            if is_only:
                try:
                    self._open_new(self._engines.wait_up(self._config.trainer.init_timeout_s))
                except BaseException as error:
                    self._fail(error if isinstance(error, Exception) else ClusterError("interrupted"))
                    self._end(stream)
                    raise
        return stream

    def admit(self, stream: JobStream, prompts: Sequence[Waiting]) -> None:
        with self._lock:
            if stream.closed:
                raise ClusterError("cannot admit prompts: the rollout stream is closed")
            if stream.first:
                self._queue.prepend(prompts)
            else:
                self._queue.append(prompts)
            self._assign()

    def waiting(self, stream: JobStream) -> list[int]:
        """See `RolloutStream.waiting`. If an engine does not answer within a second, its prompts count as started."""
        with self._lock:
            in_queue = self._queue.unanswered(stream)
            calls = [e.worker.waiting.remote(self._session, stream.job.id) for e in self._open.values() if e.held]
        at_engines = np.frombuffer(b"".join(answers(calls, _WAITING_S)), np.int32).tolist() if calls else []
        with self._lock:
            held = {key: prompt for engine in self._open.values() for key, prompt in engine.held.items()}
            prompts = [held.get((stream.job.id, index)) for index in at_engines]
            return in_queue + [prompt.index for prompt in prompts if prompt is not None and prompt.is_unanswered]

    def _window(self) -> int:
        """Return how far an engine may reach into the queue for a prompt of its group.

        A chunk for each engine and each group; of a batch at most a quarter, because a prompt ages while it waits.
        """
        n_lanes = max(self._n_groups, len(self._engines.up()))
        per_chunk = math.ceil(self._chunk_size / self._config.rollout.n)
        return min(n_lanes * per_chunk, self._config.trainer.global_batch_size // 4)

    def busy(self) -> list[str]:
        """Return the names of the engines that hold unfinished prompts."""
        with self._lock:
            return [name_of(i) for i, engine in sorted(self._open.items()) if engine.held]

    def is_any_open(self) -> bool:
        with self._lock:
            return bool(self._open)

    def end(self, stream: JobStream) -> None:
        """End a job; close the engines' streams if it is the last one."""
        with self._changing:
            self._end(stream)

    def close(self) -> None:
        """End all jobs with an error, close the engines' streams, and call the engines no more.

        Ray ends a process of which a thread calls it while it stops, so the readers are waited for.
        """
        with self._lock:
            self._session = self._session + 1
            closing = self._open.values()
            self._open = {}
        self._fail(ClusterError("the rollout engines are being stopped"))
        for engine in closing:
            engine.worker.close_stream.remote()
        for engine in closing:
            engine.reader.join(5 * _WAITING_S / len(closing))  # a stream ends behind the current pass, unless it hangs

    def _end(self, stream: JobStream) -> None:
        with self._lock:
            if stream.closed:
                return
            stream.closed = True
            del self._jobs[stream.job.id]
            self._queue.drop(stream)
            closing: dict[int, _Engine] = {}
            if not self._jobs:
                self._session += 1
                closing = self._open
                self._open = {}
        stream.put(None)
        if not closing:
            return
        try:
            calls = {name_of(i): engine.worker.close_stream.remote() for i, engine in closing.items()}
            failed: dict[str, RankFailed] = {}
            gather(calls, "closing the rollout stream", self._timeout_s, failed)
            for i, engine in closing.items():
                if name_of(i) in failed:
                    self._engines.lost(i, engine.worker, failed[name_of(i)])
        except GkdError as error:
            if self._error is None:
                raise
            log.warning("error while closing a failed rollout stream: %s", error)

    def _engines_changed(self) -> None:
        """Open streams on restarted engines, or end all jobs if an engine failed for good. Called by `Engines`."""
        threading.Thread(target=self._refresh, name="rollout engines", daemon=True).start()

    def _refresh(self) -> None:
        with self._changing:
            if not self._jobs or self._error is not None:
                return
            try:
                self._engines.check()
                self._open_new(self._engines.up())
            except Exception as error:  # the jobs raise it
                self._fail(error)

    def _open_new(self, members: dict[int, Any]) -> None:
        """Open a stream on each of these engines that has none. `_changing` is held."""
        with self._lock:
            session = self._session
            new = {i: w for i, w in members.items() if i not in self._open or self._open[i].worker != w}
            replaced = [engine for i, engine in self._open.items() if i in new]
        for engine in replaced:  # the process before it has not been read to its end
            self._lose(engine, session, RankFailed(f"{name_of(engine.index)} was replaced"))
        opening = {
            name_of(i): worker.open_stream.remote(session, self._n_groups, self._chunk_size)
            for i, worker in new.items()
        }
        failed: dict[str, RankFailed] = {}
        gather(opening, "opening the rollout stream", self._timeout_s, failed)
        opened = []
        for i, worker in new.items():
            if name_of(i) in failed:
                self._engines.lost(i, worker, failed[name_of(i)])
                continue
            engine = _Engine(i, worker, worker.admit.options(num_returns=0))
            read = engine, session, worker.stream.options(num_returns="streaming").remote()
            engine.reader = threading.Thread(target=self._read, args=read, name=f"read {name_of(i)}", daemon=True)
            engine.reader.start()
            opened.append(engine)
        with self._lock:
            self._open |= {engine.index: engine for engine in opened}
            self._assign()

    def _assign(self) -> None:
        """Send the prompts of the queue to the engines with room, one after the other to the least busy one."""
        free = [(engine.n_sequences, i) for i, engine in self._open.items() if engine.n_sequences < self._room]
        heapq.heapify(free)
        shares: defaultdict[tuple[int, int], list[Waiting]] = defaultdict(list)
        while self._queue and free:
            n_sequences, i = free[0]
            self._open[i].lane, prompt = self._queue.take(self._open[i].lane)
            shares[i, prompt.stream.job.id].append(prompt)
            n_sequences += prompt.stream.job.sampling.n
            if n_sequences < self._room:
                heapq.heapreplace(free, (n_sequences, i))
            else:
                heapq.heappop(free)
        for (i, _), share in shares.items():
            engine = self._open[i]
            stream = share[0].stream
            engine.n_sequences += len(share) * stream.job.sampling.n
            engine.held |= {prompt.key: prompt for prompt in share}
            encoded = encode_prompts([p.prompt for p in share], [p.index for p in share])
            engine.admit.remote(self._session, stream.job, encoded, stream.first)

    def _read(self, engine: _Engine, session: int, chunks: Any) -> None:
        """Hand the chunks of one engine to their jobs until its stream ends. Runs in its own thread."""
        what = f"the rollout stream of {name_of(engine.index)}"
        try:
            for rollouts in chunks:
                if (sizes := next(chunks, None)) is None:  # the single item of a failed call holds its error
                    fetch(rollouts, what)
                    raise ClusterError(f"{what} ended in the middle of a chunk")
                self._take(engine, *decode_sizes(fetch(sizes, what), rollouts))
            with self._lock:
                if self._session == session:
                    raise ClusterError(f"{what} ended before it was closed")
        except RankFailed as error:
            try:
                self._lose(engine, session, error)
            except GkdError as fatal:
                self._fail(fatal, session)
        except Exception as error:  # the jobs raise it
            self._fail(error, session)

    def _take(self, engine: _Engine, job: int, chunk: RolloutChunk) -> None:
        """Hand over the sequences of a chunk that are still missing, and give the engine its next prompts."""
        with self._lock:
            stream = self._jobs.get(job)
            engine.n_sequences -= chunk.n_sequences
            kept = None if stream is None else take_missing(engine.held, stream.job, chunk.sample_index)
            if self._queue and self._open.get(engine.index) is engine:
                self._assign()
        if stream is not None and kept is not None and len(kept):
            stream.put(part_of(chunk, kept))

    def _lose(self, engine: _Engine, session: int, error: RankFailed) -> None:
        """Report an engine that died, and give its prompts to the others."""
        with self._lock:
            if self._session != session or self._open.get(engine.index) is not engine:
                return
            del self._open[engine.index]
            again = [prompt for prompt in engine.held.values() if prompt.stream.job.id in self._jobs]
            self._queue.prepend(again)
        self._engines.lost(engine.index, engine.worker, error, n_prompts=len(again))
        with self._lock:
            self._assign()

    def _fail(self, error: Exception, session: int | None = None) -> None:
        """End all jobs of the session with this error; the first one counts."""
        with self._lock:
            if self._error is None and session in (None, self._session):
                self._error = error
                for stream in self._jobs.values():
                    stream.put(error)


@dataclass(slots=True)
class Waiting:
    """An unfinished prompt."""

    stream: JobStream
    prompt: Prompt
    index: int
    missing: set[int]  # sample indices that no engine has returned

    @classmethod
    def of(cls, stream: JobStream, prompt: Prompt, index: int) -> Waiting:
        """Return a prompt of which no sample has been returned."""
        n = stream.job.sampling.n
        return cls(stream, prompt, index, set(range(index * n, (index + 1) * n)))

    @property
    def key(self) -> tuple[int, int]:
        return self.stream.job.id, self.index

    @property
    def is_unanswered(self) -> bool:
        return len(self.missing) == self.stream.job.sampling.n


def take_missing(held: dict[tuple[int, int], Waiting], job: Job, sample_index: np.ndarray) -> list[int]:
    """Record that an engine has returned these samples; return the positions of those that were missing, ascending.

    Samples that an engine returned before it died were not missing any more: the next engine generates all samples of
    their prompt again.

    Args:
        held: by job and prompt index, the prompts that the engine answers; complete ones are removed.
        sample_index: [n] distinct.
    """
    positions: list[int] = []
    for position, sample in enumerate(sample_index.tolist()):
        prompt = held.get((job.id, sample // job.sampling.n))
        if prompt is None or sample not in prompt.missing:
            continue
        positions.append(position)
        prompt.missing.remove(sample)
        if not prompt.missing:
            del held[prompt.key]
    return positions


class JobStream:
    """Implements `gkd.roles.RolloutStream`: the prompts of one job, and their chunks. Thread-safe."""

    def __init__(self, owner: Dispatcher, job: Job, *, first: bool) -> None:
        self.job = job
        self.first = first  # its prompts go before the prompts of other jobs
        self.closed = False
        self._owner = owner
        self._results: SimpleQueue[RolloutChunk | Exception | None] = SimpleQueue()

    def admit(self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int]) -> None:
        """See `RolloutStream.admit`. Raises ClusterError: the stream is closed."""
        rows = [Waiting.of(self, prompt, i) for prompt, i in zip(prompts, prompt_indices, strict=True)]
        self._owner.admit(self, rows)

    def finished(self, timeout_s: float | None = None) -> list[RolloutChunk]:
        """See `RolloutStream.finished`; returns an empty list if the stream is closed.

        Raises:
            EngineFailed: an engine failed for good.
            ClusterError: a stream failed.
            DataError: an engine refused a prompt.
        """
        chunks: list[RolloutChunk] = []
        with suppress(Empty):  # all that have finished so far
            result = None if self.closed else self._results.get(timeout=timeout_s)
            while result is not None:
                if isinstance(result, Exception):
                    self.put(result)  # the next call raises it
                    if not chunks:
                        raise result
                    break
                chunks.append(result)
                result = self._results.get_nowait()
        return chunks

    def waiting(self) -> list[int]:
        """See `RolloutStream.waiting`."""
        return self._owner.waiting(self)

    def put(self, result: RolloutChunk | Exception | None) -> None:
        self._results.put(result)

    def close(self) -> None:
        """See `RolloutStream.close`. Raises ClusterError: an engine failed to stop; not if a stream failed before."""
        self._owner.end(self)


Lane = tuple[int, int]  # job, data-parallel group: sequences of one lane share chunks


class PromptQueue:
    """First in, first out, but an engine may go on with one data-parallel group, so that its chunks fill up.

    Not thread-safe.

    Args:
        n_groups: data-parallel groups; a prompt's index modulo this is its group.
        window: a prompt that is taken out of turn stood fewer than this many places behind the first one.
    """

    def __init__(self, n_groups: int, window: int) -> None:
        self._n_groups = n_groups
        self._window = window
        self._lanes: defaultdict[Lane, deque[tuple[int, Waiting]]] = defaultdict(deque)  # lane -> (place, prompt)
        self._heads: list[tuple[int, Lane]] = []  # heap: place of the first prompt of each lane; also outdated ones
        self._first = self._end = self._n = 0  # places and number of the prompts

    def __len__(self) -> int:
        return self._n

    def append(self, prompts: Iterable[Waiting]) -> None:
        for prompt in prompts:
            lane = self._lane(prompt)
            self._lanes[lane].append((self._end, prompt))
            if len(self._lanes[lane]) == 1:
                heapq.heappush(self._heads, (self._end, lane))
            self._end += 1
            self._n += 1

    def prepend(self, prompts: Sequence[Waiting]) -> None:
        """Put these before all others; no other prompt is taken out of turn before them."""
        self._first -= self._window
        for prompt in reversed(prompts):
            self._first -= 1
            lane = self._lane(prompt)
            self._lanes[lane].appendleft((self._first, prompt))
            heapq.heappush(self._heads, (self._first, lane))
            self._n += 1

    def take(self, lane: Lane | None) -> tuple[Lane, Waiting]:
        """Remove and return the prompt that an engine gets, and its lane; `lane` is that of its last one, if any."""
        while not self._is_head(*self._heads[0]):
            heapq.heappop(self._heads)
        first, chosen = self._heads[0]
        if lane is not None and lane in self._lanes and self._lanes[lane][0][0] < first + self._window:
            chosen = lane
        prompts = self._lanes[chosen]
        _, prompt = prompts.popleft()
        if prompts:
            heapq.heappush(self._heads, (prompts[0][0], chosen))
        else:
            del self._lanes[chosen]
        self._n -= 1
        return chosen, prompt

    def unanswered(self, stream: JobStream) -> list[int]:
        """Return the indices of a job's queued prompts, except requeued prompts with some samples returned."""
        lanes = [prompts for lane, prompts in self._lanes.items() if lane[0] == stream.job.id]
        return [prompt.index for prompts in lanes for _, prompt in prompts if prompt.is_unanswered]

    def drop(self, stream: JobStream) -> None:
        """Remove the prompts of a job."""
        for lane in [lane for lane in self._lanes if lane[0] == stream.job.id]:
            self._n -= len(self._lanes.pop(lane))

    def _lane(self, prompt: Waiting) -> Lane:
        return prompt.stream.job.id, prompt.index % self._n_groups

    def _is_head(self, place: int, lane: Lane) -> bool:
        return lane in self._lanes and self._lanes[lane][0][0] == place
