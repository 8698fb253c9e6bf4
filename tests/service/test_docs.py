"""Check docs/teacher_server.md: its client works, its YAML file loads, its tables are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from teacher_server.broker.request_queue import RequestQueue
from teacher_server.broker.status_board import StatusBoard
from teacher_server.broker.teachers import Teachers
from teacher_server.config.schema import HTTP_OPTIONS, N_WORKERS, SERVER_OPTIONS, TEACHER_OPTIONS
from teacher_server.config.settings import flag_of
from teacher_server.wire.protocol import ClientMessage
from teacher_server.worker.gpus import FoundGpus, plan_workers
from tests.service.harness import TRIVIAL, ServerProcess, trivial_model
from tests.unit.test_server_settings import in_file, settings_of

PAGE = (Path(__file__).resolve().parents[2] / "docs/teacher_server.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.service
def test_the_client_of_the_page_gets_scores(tmp_path: Path) -> None:
    """Fails if a client written from the page alone does not work."""
    (code,) = blocks("python")
    with ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=TRIVIAL) as server:
        code = code.replace("127.0.0.1:15555", f"127.0.0.1:{server.port}")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    numbers = [float(word) for word in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", done.stdout)]
    assert len(numbers) == 4 * 8 * 2 + 4 and all(0 < tail < 1 for tail in numbers[-4:])


def test_the_file_of_the_page_loads(tmp_path: Path) -> None:
    """Fails if the YAML example is refused, or gives other workers than described."""
    (text,) = blocks("yaml")
    five = FoundGpus(tuple("01234"), "nvidia-smi", {})
    plans = plan_workers(settings_of(*in_file(tmp_path, text)), five)
    assert [(plan.teacher.name, plan.gpus) for plan in plans] == [
        ("math", ("0", "1")),
        ("math", ("2", "3")),
        ("code", ("4",)),
    ]


def test_every_setting_message_and_metric_is_on_the_page() -> None:
    """Fails if a setting, a message or a metric is not documented."""
    for option in (*SERVER_OPTIONS, *HTTP_OPTIONS, *TEACHER_OPTIONS, N_WORKERS):
        assert f"`{option.name if option.setting.in_file_only else flag_of(option.name)}" in PAGE, option.name
    for message in ClientMessage.__args__:
        tag, fields = message.__struct_config__.tag, message.__struct_fields__
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{tag}` |"))
        assert all(f"`{field}`" in row for field in fields), (tag, fields)
    registry = CollectorRegistry()
    StatusBoard(b"", RequestQueue(b"", 0), Teachers({}), registry)
    for metric in registry.collect():
        assert f"`{metric.name.removeprefix('teacher_server_')}" in PAGE, metric.name
