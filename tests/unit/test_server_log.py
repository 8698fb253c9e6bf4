"""Test the JSON log lines of the teacher server, its status table, and its Prometheus endpoint over real HTTP."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from teacher_server.broker.metrics import serve_metrics
from teacher_server.broker.request_queue import RequestQueue
from teacher_server.broker.status_board import StatusBoard
from teacher_server.broker.teachers import Teachers
from teacher_server.cli.admin import status_table
from teacher_server.errors import ServerError
from teacher_server.log import JsonLines
from teacher_server.wire.status import Gpu, ServerStatus, TeacherStatus, WorkerStatus
from tests.random_models import save_random


def test_json_lines_carry_extra_fields_and_tracebacks() -> None:
    """Fails if a record is not one line with one JSON object, or an extra field replaces the level."""
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.makeLogRecord(
            {"name": "a.b", "levelname": "ERROR", "msg": "lost %s", "args": ("w0.1",), "exc_info": sys.exc_info()}
            | {"worker": "w0.1", "level": "false", "when": {1}}
        )
    text = JsonLines("server").format(record)
    line = json.loads(text)
    assert "\n" not in text and list(line)[:6] == ["time", "level", "process", "pid", "logger", "message"]
    assert line["message"] == "lost w0.1" and line["logger"] == "a.b" and line["process"] == "server"
    assert line["level"] == "ERROR" and line["worker"] == "w0.1" and "ValueError: two\nlines" in line["error"]


def make_status() -> ServerStatus:
    worker = WorkerStatus(
        name="w0.0",
        teacher="math",
        state="ready",
        host="host7",
        pid=77,
        engine="vllm",
        device="cuda:0",
        dtype="bfloat16",
        gpus=[Gpu(id="4", uuid="GPU-ab", name="H200"), Gpu(id="MIG-1", uuid="MIG-1")],
        n_in_flight=3,
        tokens_in_flight=1234,
        n_done=9,
        n_tokens=99,
        tokens_per_s=5678.4,
        queue_s=0.0123,
        compute_s=0.5,
        last_heard_s=0.25,
    )
    teachers = [
        TeacherStatus(
            name=name,
            model_name=model,
            model_path=model and f"/models/{model}",
            model_fingerprint=model * 32,
            tokenizer_fingerprint="",
            n_queued=n_queued,
            n_workers=n_queued // 2,
        )
        for name, model, n_queued in (("math", "m", 2), ("code", "", 0))
    ]
    return ServerStatus(
        epoch="ab" * 16,
        uptime_s=3725.0,
        draining=True,
        n_queued=2,
        queued_bytes=3 << 20,
        n_answered=1000000,
        n_errors={"busy": 4},
        n_retried=1,
        n_lost_workers=1,
        excluded={"w1.0": "a NaN\x1b[2J in logprobs"},
        teachers=teachers,
        workers=[worker],
    )


@pytest.mark.parametrize(("n_workers", "state"), [(0, "waiting for workers"), (1, "serving")])
def test_a_server_whose_workers_load_is_not_said_to_serve(n_workers: int, state: str) -> None:
    """Fails if `status` shows a teacher without a worker as one that serves."""
    teachers = [structs.replace(each, n_workers=n_workers) for each in make_status().teachers]
    status = structs.replace(make_status(), draining=False, teachers=teachers)
    assert state in status_table("tcp://here:1", status).splitlines()[0]


def test_the_table_shows_workers_gpus_and_exclusions() -> None:
    """Fails if the table omits a worker's GPU, a teacher without workers, or an excluded worker and its reason."""
    text = status_table("tcp://here:1", make_status())
    for cell in (
        "draining",
        "1 h 2 min",
        "1,000,000",
        "2 (3.0 MiB)",
        "4 busy",
        "host7:77",
        "4 GPU-ab H200, MIG-1",
        "3 (1,234 tokens)",
        "5,678",
        "0.012 s",
        "(no worker yet)",
        "excluded w1.0: a NaN",
    ):
        assert cell in text, (cell, text)


def test_a_worker_cannot_control_the_terminal() -> None:
    """Fails if control characters in a worker's name or error reach the terminal."""
    assert "\x1b" not in status_table("tcp://here:1", make_status())


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
    board = StatusBoard(b"", RequestQueue(b"", 0), Teachers({}), registry)
    for _ in range(3):
        board.completed("math", "topk", 100, 0.02, 2.0)
    board.completed("math", "head", 0, 0.5, 0.0)
    board.refused("busy")
    board.retried(2)
    board.lost_worker()
    board.excluded("w0.1", "it sent bad data")
    with ExitStack() as stack:
        read = scrape(serve_metrics(stack, "127.0.0.1", 0, make_status, registry))
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
    """Fails if the port stays bound after its end, or a taken port is not an error."""
    with ExitStack() as stack:
        port = serve_metrics(stack, "127.0.0.1", 0, make_status, CollectorRegistry())
        with pytest.raises(ServerError, match="--metrics-port"):
            serve_metrics(stack, "127.0.0.1", port, make_status, CollectorRegistry())
    with socket.create_server(("127.0.0.1", port), reuse_port=False):
        pass


def test_the_transformers_engine_prints_nothing_while_it_loads(tmp_path: Path) -> None:
    """Fails if stderr of a worker has a progress bar, which is neither a log line nor JSON."""
    code = f"""
from teacher_server.engines.load import EngineSettings, load_engine
load_engine(EngineSettings(model={str(save_random(tmp_path / "model"))!r}, max_tokens=8, engine="hf", device="cpu"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
