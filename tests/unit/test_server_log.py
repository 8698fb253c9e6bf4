"""JSON log lines and the status table."""

from __future__ import annotations

import json
import logging
import sys

from teacher_server.cli.admin import status_table
from teacher_server.log import JsonLines
from teacher_server.wire.status import Gpu, ServerStatus, TeacherStatus, WorkerStatus


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
