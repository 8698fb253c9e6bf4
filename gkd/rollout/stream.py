"""Driver side of the rollout stream: send each prompt to the least busy engine, return chunks as they finish."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import ray

from gkd.cluster.calls import fetch, gather
from gkd.data.chunks import decode_sizes
from gkd.data.prompt_codec import encode_prompts
from gkd.errors import ClusterError, GkdError, RankTimeout
from gkd.handles import RolloutChunk
from gkd.log import get_logger
from gkd.rollout.sampling import Sampling
from gkd.types import Prompt

log = get_logger("rollout_stream")


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
    """Implements `gkd.handles.RolloutStream`: one open stream on each engine. Thread-safe.

    Args:
        workers: Ray handles of all engines; none has an open stream.
        timeout_s: limit for opening and closing an engine's stream, and for the second half of a chunk.
    """

    def __init__(self, workers: Sequence[Any], sampling: Sampling, dp_size: int, timeout_s: float) -> None:
        self._workers, self._timeout_s = list(workers), timeout_s
        self._names = [f"rollout engine {i}" for i in range(len(workers))]
        self._lock = threading.Lock()  # guards the next three lines
        self._unfinished = [0] * len(workers)
        self._admitted: list[tuple[Any, str]] = []  # pending calls of `admit`, with the engine's name
        self._closed = self._failed = False
        self._reading = threading.Lock()  # guards the next line; one thread reads at a time
        self._items: dict[Any, int] = {}  # generator of an engine's chunks -> engine index
        opening = {name: worker.open_stream.remote(sampling) for name, worker in self._by_name()}
        try:
            gather(opening, "opening the rollout stream", timeout_s)
            for engine, worker in enumerate(self._workers):
                self._items[worker.stream.options(num_returns="streaming").remote(dp_size)] = engine
        except BaseException:
            self._failed = True
            self.close()
            raise

    def admit(self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int]) -> None:
        """See `RolloutStream.admit`. Raises ClusterError: the stream is closed. DataError: see `encode_prompts`."""
        with self._lock:
            if self._closed:
                raise ClusterError("cannot admit prompts: the rollout stream is closed")
            shares: dict[int, list[int]] = defaultdict(list)
            for j, engine in enumerate(least_busy(len(prompts), self._unfinished)):
                shares[engine].append(j)
            encoded = {
                e: encode_prompts([prompts[j] for j in s], [prompt_indices[j] for j in s]) for e, s in shares.items()
            }
            for engine, share in shares.items():
                ref = self._workers[engine].admit.remote(encoded[engine])
                self._admitted.append((ref, self._names[engine]))
                self._unfinished[engine] += len(share)

    def finished(self, timeout_s: float) -> list[RolloutChunk]:
        """See `RolloutStream.finished`; returns an empty list at once if the stream is closed.

        Raises:
            ClusterError: an engine died, or its stream failed.
            DataError: an engine refused a prompt.
        """
        deadline = time.monotonic() + timeout_s
        chunks: list[RolloutChunk] = []
        with self._reading:
            try:
                while self._items and not self._closed:
                    left_s = 0.0 if chunks else max(0.0, deadline - time.monotonic())
                    # Do not fetch: the driver needs only the sizes.
                    ready, _ = ray.wait(list(self._items), num_returns=1, timeout=left_s, fetch_local=False)
                    if not ready:
                        break
                    chunks += self._read(ready[0])
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
            admitted = [ref for ref, _ in self._admitted]
            self._admitted.clear()
        try:
            if admitted:
                ray.wait(admitted, num_returns=len(admitted), timeout=self._timeout_s)
            closing = {name: worker.close_stream.remote() for name, worker in self._by_name()}
            gather(closing, "closing the rollout stream", self._timeout_s)
        except GkdError as error:
            if not self._failed:
                raise
            log.warning("error while closing a failed rollout stream: %s", error)
        with self._reading:
            self._items.clear()  # also frees unread chunks

    @property
    def closed(self) -> bool:
        return self._closed

    def _read(self, items: Any) -> list[RolloutChunk]:
        engine = self._items[items]
        chunk = next_chunk(items, f"the rollout stream of {self._names[engine]}", self._timeout_s)
        if chunk is None:
            del self._items[items]
            if not self._closed:
                raise ClusterError(f"the rollout stream of {self._names[engine]} ended before it was closed")
            return []
        with self._lock:
            self._unfinished[engine] -= 1
        return [chunk]

    def _check_admitted(self) -> None:
        """Raise the error of a failed `admit` call and forget the completed ones."""
        with self._lock:
            if self._closed:
                return
            names = dict(self._admitted)  # ref -> engine
            done, _ = ray.wait(list(names), num_returns=len(names), timeout=0) if names else ([], [])
            self._admitted = [(ref, name) for ref, name in self._admitted if ref not in done]
        for ref in done:
            fetch(ref, f"admitting prompts to {names[ref]}")

    def _by_name(self) -> list[tuple[str, Any]]:
        return list(zip(self._names, self._workers, strict=True))
