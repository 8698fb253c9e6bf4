"""Serve Prometheus metrics: counters and histograms of the broker, and gauges of its snapshot.

The broker's thread calls `BrokerMetrics`, which takes a few microseconds. A scrape runs in its own thread and
reads `snapshot()`, so a slow reader does not slow the broker.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from teacher_server.errors import ServerError
from teacher_server.wire.protocol import ErrorCode
from teacher_server.wire.status import ServerStatus

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_STATES = ("ready", "draining")


class BrokerMetrics:
    """Counters and histograms since the start of the server. Call it from one thread.

    Args:
        registry: source of the metrics page; None serves no metrics.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
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

    def completed(self, teacher: str, signal: str, n_tokens: int, queue_s: float, compute_s: float) -> None:
        """Count a completed request.

        Args:
            signal: as in the header of the reply.
            n_tokens: P + R of the request, 0 for the LM head.
        """
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
        self._refused.labels(code).inc()

    def retried(self, n: int) -> None:
        self._retried.inc(n)

    def lost_worker(self) -> None:
        self._lost.inc()

    def excluded(self) -> None:
        self._excluded.inc()


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(f"teacher_server_{name}", text, labels, registry=registry)  # Prometheus appends _total


def _histogram(registry: CollectorRegistry, name: str, text: str) -> Histogram:
    return Histogram(f"teacher_server_{name}", text, ("teacher",), registry=registry, buckets=_SECONDS)


class HasSnapshot(Protocol):
    """The part of the broker that the gauges read."""

    def snapshot(self) -> ServerStatus: ...


class _Gauges(Collector):
    """State of the server at the time of a scrape."""

    def __init__(self, broker: HasSnapshot) -> None:
        self._broker = broker

    def collect(self) -> Iterator[Metric]:
        status = self._broker.snapshot()
        yield _gauge("uptime_seconds", "Time since the start of the server.", [((), status.uptime_s)])
        yield _gauge("draining", "1 while new requests are refused.", [((), float(status.draining))])
        yield _gauge("queued_bytes", "Bytes of requests that wait for a worker.", [((), status.queued_bytes)])
        queued = [((teacher.name,), float(teacher.n_queued)) for teacher in status.teachers]
        yield _gauge("queued_requests", "Requests that wait for a worker.", queued, "teacher")
        workers = [
            ((teacher.name, state), sum(w.teacher == teacher.name and w.state == state for w in status.workers))
            for teacher in status.teachers
            for state in _STATES
        ]
        yield _gauge("workers", "Workers that have joined.", workers, "teacher", "state")
        for name, text, field in (
            ("worker_in_flight", "Requests assigned to a worker.", "n_in_flight"),
            ("worker_tokens_in_flight", "Tokens of the requests assigned to a worker.", "tokens_in_flight"),
            ("worker_tokens_per_second", "Tokens scored per second, over about ten seconds.", "tokens_per_s"),
            ("worker_last_heard_seconds", "Time since the last heartbeat of a worker.", "last_heard_s"),
        ):
            values = [((worker.name, worker.teacher), float(getattr(worker, field))) for worker in status.workers]
            yield _gauge(name, text, values, "worker", "teacher")


def _gauge(name: str, text: str, values: Sequence[tuple[tuple[str, ...], float]], *labels: str) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f"teacher_server_{name}", text, labels=labels)
    for label_values, value in values:
        gauge.add_metric(label_values, value)
    return gauge


class MetricsServer:
    """A running /metrics endpoint."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    def stop(self) -> None:
        """Close the port; blocks for at most about half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(host: str, port: int, broker: HasSnapshot, registry: CollectorRegistry) -> MetricsServer:
    """Serve HTTP on host:port in its own thread, without authentication. Port 0 picks a free port.

    Raises:
        ServerError: if the address cannot be bound.
    """
    registry.register(_Gauges(broker))
    try:
        return MetricsServer(*start_http_server(port, host, registry))
    except OSError as error:
        fix = "Fix: change --metrics-port or --metrics-host."
        raise ServerError(f"cannot listen on {host}:{port} for metrics: {error.strerror}. {fix}") from error
