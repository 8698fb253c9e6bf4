"""Serve Prometheus metrics: the counters and histograms of `StatusBoard`, and gauges of the broker's status.

A scrape runs in its own thread and reads the latest status, so a slow reader does not slow the broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from teacher_server.errors import ServerError
from teacher_server.wire.status import ServerStatus


class _Gauges(Collector):
    """State of the server at the time of a scrape."""

    def __init__(self, status: Callable[[], ServerStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield _gauge("uptime_seconds", "Time since the start of the server.", [((), status.uptime_s)])
        yield _gauge("draining", "1 while new requests are refused.", [((), float(status.draining))])
        yield _gauge("queued_bytes", "Bytes of requests that wait for a worker.", [((), status.queued_bytes)])
        queued = [((teacher.name,), float(teacher.n_queued)) for teacher in status.teachers]
        yield _gauge("queued_requests", "Requests that wait for a worker.", queued, "teacher")
        workers = [
            ((teacher.name, state), sum(w.teacher == teacher.name and w.state == state for w in status.workers))
            for teacher in status.teachers
            for state in ("ready", "draining")
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


def serve_metrics(
    stack: ExitStack, host: str, port: int, status: Callable[[], ServerStatus], registry: CollectorRegistry
) -> int:
    """Serve HTTP on host:port in its own thread, without authentication, and return the port. 0 picks a free port.

    Args:
        stack: closes the port; that blocks for at most about half a second.
        status: returns the latest status; any thread may call it.

    Raises:
        ServerError: if the address cannot be bound.
    """
    registry.register(_Gauges(status))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        fix = "Fix: change --metrics-port or --metrics-host."
        raise ServerError(f"cannot listen on {host}:{port} for metrics: {error.strerror}. {fix}") from error
    for end in (thread.join, server.server_close, server.shutdown):  # the last one is the first that `stack` calls
        stack.callback(end)
    return server.server_port
