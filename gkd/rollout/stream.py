"""Driver side of the rollout stream: send each prompt to the least busy engine, return chunks as they finish."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from gkd.cluster.calls import fetch, gather
from gkd.data.chunks import decode_sizes
from gkd.data.prompt_codec import encode_prompts
from gkd.errors import ClusterError, GkdError, RankFailed, RankTimeout
from gkd.handles import RolloutChunk
from gkd.log import get_logger
from gkd.rollout.recovery import Engines
from gkd.rollout.sampling import Sampling
from gkd.types import Prompt

log = get_logger("rollout_stream")

_RESTART_POLL_S = 0.1  # while no engine is up


@dataclass(slots=True)
class _Open:
    """The stream of one process."""

    worker: Any
    items: Any  # generator of its chunks
    unfinished: dict[int, Prompt] = field(default_factory=dict)  # by prompt index


def name_of(engine: int) -> str:
    return f"rollout engine {engine}"


def next_chunk(items: Any, what: str, timeout_s: float) -> RolloutChunk | None:
    """Read the two objects of a chunk from the streaming generator of a worker's call; the first must be ready.

    Args:
        what: name of the call and its engine, for messages.
        timeout_s: limit of the wait for the second object, which a healthy worker sends at once.

    Returns:
        None if the call has ended.

    Raises:
        RankTimeout: the second object did not arrive.
        GkdError: the call failed; see `fetch`.
    """
    try:
        rollouts = next(items)
    except StopIteration:
        return None
    ready, _ = ray.wait([items], num_returns=1, timeout=timeout_s, fetch_local=False)
    if not ready:
        raise RankTimeout(f"{what}: received only half of a chunk; timed out after {timeout_s:g} s")
    try:
        sizes = next(items)
    except StopIteration:  # the single item of a failed call holds its error
        fetch(rollouts, what)
        raise ClusterError(f"{what} ended in the middle of a chunk") from None
    return decode_sizes(fetch(sizes, what), rollouts)


def least_busy(n_prompts: int, unfinished: Sequence[int]) -> list[int]:
    """Assign prompts one after the other to the engine with the fewest unfinished prompts; ties go to the first.

    Args:
        unfinished: number of unfinished prompts of each engine.

    Returns:
        Engine index of each prompt.
    """
    counts = list(unfinished)
    chosen = []
    for _ in range(n_prompts):
        chosen.append(counts.index(min(counts)))
        counts[chosen[-1]] += 1
    return chosen


class EngineStreams:
    """Implements `gkd.handles.RolloutStream`: one open stream on each engine that is up. Thread-safe.

    The unfinished prompts of an engine that dies go to the others; a restarted engine gets a stream of its own.

    Args:
        engines: none has an open stream.
        timeout_s: limit for opening and closing an engine's stream, and for the second half of a chunk.
    """

    def __init__(self, engines: Engines, sampling: Sampling, dp_size: int, timeout_s: float) -> None:
        self._engines, self._sampling, self._dp_size, self._timeout_s = engines, sampling, dp_size, timeout_s
        self._lock = threading.Lock()  # guards the next four lines
        self._open: dict[int, _Open] = {}  # by engine index
        self._waiting: dict[int, Prompt] = {}  # by prompt index: no engine is up
        self._admitted: list[tuple[Any, int, Any]] = []  # pending calls of `admit`, with index and handle of the engine
        self._closed = self._failed = False
        self._reading = threading.Lock()  # one thread reads at a time
        try:
            self._open_new()
        except BaseException:
            self._failed = True
            self.close()
            raise

    def admit(self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int]) -> None:
        """See `RolloutStream.admit`. Raises ClusterError: the stream is closed. DataError: see `encode_prompts`."""
        with self._lock:
            if self._closed:
                raise ClusterError("cannot admit prompts: the rollout stream is closed")
            self._admit(dict(zip(prompt_indices, prompts, strict=True)))

    def finished(self, timeout_s: float) -> list[RolloutChunk]:
        """See `RolloutStream.finished`; returns an empty list at once if the stream is closed.

        Raises:
            EngineFailed: an engine failed for good.
            ClusterError: a stream failed.
            DataError: an engine refused a prompt.
        """
        deadline = time.monotonic() + timeout_s
        chunks: list[RolloutChunk] = []
        with self._reading:
            try:
                while not self._closed:
                    self._engines.check()
                    self._open_new()
                    streams = {stream.items: index for index, stream in self._open.items()}
                    left_s = 0.0 if chunks else max(0.0, deadline - time.monotonic())
                    if not streams:
                        time.sleep(min(left_s, _RESTART_POLL_S))
                    # Do not fetch: the driver needs only the sizes.
                    ready = streams and ray.wait(list(streams), num_returns=1, timeout=left_s, fetch_local=False)[0]
                    if ready:
                        chunks += self._read(streams[ready[0]])
                    elif time.monotonic() >= deadline or chunks:
                        break
                self._check_admitted()
            except GkdError:
                self._failed = True
                raise
        return chunks

    def close(self) -> None:
        """See `RolloutStream.close`. Raises ClusterError: an engine failed to stop; not if `finished` raised before."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # Pending `admit` calls must complete first; otherwise the next stream would receive their prompts.
            admitted = [ref for ref, *_ in self._admitted]
            self._admitted.clear()
            streams = dict(self._open)
        try:
            if admitted:
                ray.wait(admitted, num_returns=len(admitted), timeout=self._timeout_s)
            closing = {name_of(i): stream.worker.close_stream.remote() for i, stream in streams.items()}
            failed: dict[str, RankFailed] = {}
            gather(closing, "closing the rollout stream", self._timeout_s, failed)
            for i, stream in streams.items():
                if name_of(i) in failed:
                    self._engines.lost(i, stream.worker, failed[name_of(i)])
        except GkdError as error:
            if not self._failed:
                raise
            log.warning("error while closing a failed rollout stream: %s", error)
        with self._reading:
            self._open.clear()  # also frees unread chunks

    @property
    def closed(self) -> bool:
        return self._closed

    def _open_new(self) -> None:
        """Open a stream on each engine that is up and has none, and give it its share of the prompts that wait."""
        members = self._engines.up()
        new = {i: worker for i, worker in members.items() if i not in self._open or self._open[i].worker != worker}
        if not new:
            return
        opening = {name_of(i): worker.open_stream.remote(self._sampling) for i, worker in new.items()}
        failed: dict[str, RankFailed] = {}
        gather(opening, "opening the rollout stream", self._timeout_s, failed)
        for i, worker in new.items():
            if i in self._open:  # the process before it has not been read to its end
                self._lose(i, RankFailed(f"{name_of(i)} was replaced"))
            if name_of(i) in failed:
                self._engines.lost(i, worker, failed[name_of(i)])
                continue
            items = worker.stream.options(num_returns="streaming").remote(self._dp_size)
            with self._lock:
                if self._closed:  # meanwhile: `close` has not seen it
                    worker.close_stream.remote()
                    return
                self._open[i] = _Open(worker, items)
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            if waiting:
                self._admit(waiting)

    def _admit(self, prompts: Mapping[int, Prompt]) -> None:
        """Send prompts, by index, to the engines with an open stream. The lock is held."""
        engines = list(self._open)
        if not engines:
            self._waiting |= prompts
            return
        shares: dict[int, dict[int, Prompt]] = defaultdict(dict)
        unfinished = [len(self._open[i].unfinished) for i in engines]
        for (index, prompt), place in zip(prompts.items(), least_busy(len(prompts), unfinished), strict=True):
            shares[engines[place]][index] = prompt
        encoded = {i: encode_prompts(list(share.values()), list(share)) for i, share in shares.items()}
        for i, share in shares.items():
            worker = self._open[i].worker
            self._admitted.append((worker.admit.remote(encoded[i]), i, worker))
            self._open[i].unfinished |= share

    def _read(self, engine: int) -> list[RolloutChunk]:
        stream = self._open[engine]
        try:
            chunk = next_chunk(stream.items, f"the rollout stream of {name_of(engine)}", self._timeout_s)
        except RankFailed as error:
            self._lose(engine, error)
            return []
        if chunk is None:
            if not self._closed:
                raise ClusterError(f"the rollout stream of {name_of(engine)} ended before it was closed")
            with self._lock:
                del self._open[engine]
            return []
        with self._lock:
            del stream.unfinished[int(chunk.sample_index[0]) // self._sampling.n]
        return [chunk]

    def _lose(self, engine: int, error: RankFailed) -> None:
        """Report an engine that died, and give its prompts to the others."""
        with self._lock:
            stream = self._open.pop(engine)
            self._admit(stream.unfinished)
        self._engines.lost(engine, stream.worker, error, n_prompts=len(stream.unfinished))

    def _check_admitted(self) -> None:
        """Raise the error of a failed `admit` call and forget the completed ones."""
        with self._lock:
            if self._closed:
                return
            calls = {ref: (index, worker) for ref, index, worker in self._admitted}
            done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0) if calls else ([], [])
            self._admitted = [call for call in self._admitted if call[0] not in done]
        for ref in done:
            try:
                fetch(ref, f"admitting prompts to {name_of(calls[ref][0])}")
            except RankFailed as error:  # its stream ends, too; that returns the prompts
                self._engines.lost(*calls[ref], error)
