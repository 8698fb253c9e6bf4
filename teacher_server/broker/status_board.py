"""Count the broker's events, for Prometheus and for the status, and publish the status for other threads."""

from __future__ import annotations

import collections
import math
import time
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram

from teacher_server.broker.request_queue import RequestQueue
from teacher_server.broker.teachers import Teachers
from teacher_server.wire.protocol import ErrorCode
from teacher_server.wire.status import ServerStatus, WorkerStatus

_REFRESH_S = 0.5
_RATE_S = 10.0  # time constant of tokens/s
_MAX_ENTRIES = 1000  # largest size of a table whose keys a worker chooses
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # bounds of the histograms' bins
_OF_HELLO = ("name", "teacher", "host", "pid", "engine", "device", "dtype", "gpus", "cuda_visible_devices")

T = TypeVar("T")


class StatusBoard:
    """Counters of the broker and its latest status. `latest` is replaced, never modified, so readers need no lock.

    Counting an event takes a few microseconds.

    Args:
        registry: source of the metrics page; None serves no metrics.
    """

    def __init__(
        self,
        epoch: bytes,
        request_queue: RequestQueue,
        teachers: Teachers,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.draining = False
        self._epoch = epoch
        self._queue = request_queue
        self._teachers = teachers
        self._n_answered = 0
        self._n_lost_workers = 0
        self._n_errors: collections.Counter[ErrorCode] = collections.Counter()
        self._reason_of: dict[str, str] = {}  # excluded worker -> reason
        self._started_s = self._refreshed_s = time.monotonic()
        self._tokens_before: dict[bytes, int] = {}
        registry = CollectorRegistry() if registry is None else registry
        by_signal = ("teacher", "signal")
        self._requests = _counter(registry, "requests_answered", "Requests completed with scores.", *by_signal)
        self._tokens = _counter(registry, "tokens_scored", "Tokens of completed requests, with prompts.", *by_signal)
        self._queue_s = _histogram(registry, "queue_seconds", "From the arrival of a request to its forward pass.")
        self._compute_s = _histogram(registry, "compute_seconds", "Compute time of the batch of a request.")
        self._refused = _counter(registry, "requests_refused", "Requests completed with an error.", "code")
        self._retried = _counter(registry, "requests_retried", "Requests assigned again, to another worker.")
        self._lost = _counter(registry, "workers_lost", "Workers that died or stopped sending heartbeats.")
        self._excluded = _counter(registry, "workers_excluded", "Workers that sent bad data.")
        self._children: dict[tuple[str, str], tuple[Counter, Counter, Histogram, Histogram]] = {}
        self.latest = self._build(self._started_s)

    def completed(self, teacher: str, signal: str, n_tokens: int, queue_s: float, compute_s: float) -> None:
        """Count a completed request.

        Args:
            signal: as in the header of the reply.
            n_tokens: P + R of the request, 0 for the LM head.
        """
        self._n_answered += 1
        children = self._children.get((teacher, signal))
        if children is None:  # `labels` takes a lock and formats strings, so call it once per pair
            children = self._children[teacher, signal] = (
                self._requests.labels(teacher, signal),
                self._tokens.labels(teacher, signal),
                self._queue_s.labels(teacher),
                self._compute_s.labels(teacher),
            )
        requests, tokens, queue, compute = children
        requests.inc()
        tokens.inc(n_tokens)
        queue.observe(queue_s)
        compute.observe(compute_s)

    def refused(self, code: ErrorCode) -> None:
        self._n_errors[code] += 1
        self._refused.labels(code).inc()

    def retried(self, n: int) -> None:
        self._retried.inc(n)

    def lost_worker(self) -> None:
        self._n_lost_workers += 1
        self._lost.inc()

    def excluded(self, worker: str, reason: str) -> None:
        store(self._reason_of, worker, reason)
        self._excluded.inc()

    def tick(self, now_s: float) -> None:
        """Update the rates and `latest` if half a second has passed."""
        elapsed_s = now_s - self._refreshed_s
        if elapsed_s < _REFRESH_S:
            return
        share = 1 - math.exp(-elapsed_s / _RATE_S)
        for identity, worker in self._queue.workers.items():
            rate = (worker.n_tokens_done - self._tokens_before.get(identity, 0)) / elapsed_s
            worker.tokens_per_s += share * (rate - worker.tokens_per_s)
        self._tokens_before = {key: worker.n_tokens_done for key, worker in self._queue.workers.items()}
        self._refreshed_s = now_s
        self.latest = self._build(now_s)

    def now(self) -> ServerStatus:
        """Return the current status. Call it from the broker's thread only."""
        self.latest = self._build(time.monotonic())
        return self.latest

    def _build(self, now_s: float) -> ServerStatus:
        request_queue = self._queue
        return ServerStatus(
            epoch=self._epoch.hex(),
            uptime_s=now_s - self._started_s,
            draining=self.draining,
            n_queued=request_queue.n_queued,
            queued_bytes=request_queue.queued_bytes,
            n_answered=self._n_answered,
            n_errors={str(code): count for code, count in self._n_errors.items()},
            n_retried=request_queue.n_retried,
            n_lost_workers=self._n_lost_workers,
            excluded=dict(self._reason_of),
            teachers=self._teachers.statuses(request_queue),
            workers=[
                WorkerStatus(
                    **{field: getattr(worker.hello, field) for field in _OF_HELLO},
                    state="draining" if worker.leaving else "ready",
                    n_in_flight=len(worker.outstanding),
                    tokens_in_flight=worker.n_tokens,
                    n_done=worker.n_done,
                    n_tokens=worker.n_tokens_done,
                    tokens_per_s=worker.tokens_per_s,
                    queue_s=worker.queue_s,
                    compute_s=worker.compute_s,
                    last_heard_s=max(0.0, now_s - worker.last_heard_s),
                )
                for worker in request_queue.workers.values()
            ],
        )


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(f"teacher_server_{name}", text, labels, registry=registry)  # Prometheus appends _total


def _histogram(registry: CollectorRegistry, name: str, text: str) -> Histogram:
    return Histogram(f"teacher_server_{name}", text, ("teacher",), registry=registry, buckets=_SECONDS)


def store(entries: dict[T, str], key: T, text: str) -> None:
    """Add an entry, and drop the oldest one above the limit."""
    entries[key] = text
    if len(entries) > _MAX_ENTRIES:
        del entries[next(iter(entries))]
