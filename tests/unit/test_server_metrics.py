"""The Prometheus endpoint, scraped over real HTTP."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from teacher_server.broker.metrics import BrokerMetrics, serve_metrics
from teacher_server.errors import ServerError
from teacher_server.wire.status import ServerStatus
from tests.unit.test_server_log import make_status


class Snapshots:
    """The part of the broker that the endpoint reads."""

    def snapshot(self) -> ServerStatus:
        return make_status()


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Return {(name, label values sorted by label...): value}."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        families = text_string_to_metric_families(response.read().decode())
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_scrape_reads_counts_times_and_gauges() -> None:
    """Fails if a metric is missing, or has the labels of another worker or teacher."""
    registry = CollectorRegistry()
    metrics = BrokerMetrics(registry)
    for _ in range(3):
        metrics.completed("math", "topk", 100, 0.02, 2.0)
    metrics.completed("math", "head", 0, 0.5, 0.0)
    metrics.refused("busy")
    metrics.retried(2)
    metrics.lost_worker()
    metrics.excluded()
    server = serve_metrics("127.0.0.1", 0, Snapshots(), registry)
    try:
        read = scrape(server.port)
    finally:
        server.stop()
    name = "teacher_server_"
    assert read[name + "requests_answered_total", "topk", "math"] == 3
    assert read[name + "tokens_scored_total", "topk", "math"] == 300
    assert read[name + "queue_seconds_bucket", "0.03", "math"] == 3  # labels in order: le, teacher
    assert read[name + "compute_seconds_sum", "math"] == 6
    assert read[name + "requests_refused_total", "busy"] == 1
    assert read[name + "requests_retried_total",] == 2
    assert read[name + "workers_lost_total",] == read[name + "workers_excluded_total",] == 1
    assert read[name + "queued_bytes",] == 3 << 20 and read[name + "draining",] == 1
    assert read[name + "workers", "ready", "math"] == 1 and read[name + "workers", "ready", "code"] == 0
    assert read[name + "worker_in_flight", "math", "w0.0"] == 3
    assert read[name + "worker_tokens_per_second", "math", "w0.0"] == pytest.approx(5678.4)


def test_the_port_is_free_again_after_stop_and_taken_is_an_error() -> None:
    """Fails if the port stays bound after `stop`, or a taken port is not an error."""
    registry = CollectorRegistry()
    server = serve_metrics("127.0.0.1", 0, Snapshots(), registry)
    with pytest.raises(ServerError, match="--metrics-port"):
        serve_metrics("127.0.0.1", server.port, Snapshots(), CollectorRegistry())
    server.stop()
    with socket.create_server(("127.0.0.1", server.port), reuse_port=False):
        pass
