"""Test what `gkd train --student A --teacher B --data FILE` and `gkd init` make of their words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gkd import api, main_gkd
from gkd.cluster.gpu_table import GpuInfo
from gkd.config.load import load_config, yaml_values
from gkd.config.schema_sections import all_keys
from gkd.start import own_teacher
from gkd.tools import init
from tests.refusals import refuses

WORDS = ["--student", "m/small", "--data", "a.jsonl", "--data", "b.jsonl"]


def test_flags_are_settings_and_a_run_gets_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a second run of the same line resumes the first or is refused, or a setting of the user is replaced."""
    monkeypatch.chdir(tmp_path)

    def loaded(*more: str) -> Any:
        args = main_gkd._parse([*WORDS, *more])
        return load_config(args.config, main_gkd._overrides(args))

    first = loaded()
    assert (first.model.path, first.data.train_files) == ("m/small", ["a.jsonl", "b.jsonl"])
    assert first.trainer.run_dir == "runs/small-1"
    (tmp_path / "runs/small-1").mkdir(parents=True)
    assert loaded().trainer.run_dir == "runs/small-2"
    assert loaded("trainer.run_dir=mine").trainer.run_dir == "mine"
    (tmp_path / "a.yaml").write_text("trainer: {run_dir: of_file}\n")
    assert loaded("--config", "a.yaml", "model.path=other").trainer.run_dir == "of_file"
    assert loaded("a.yaml", "model.path=other").model.path == "other"


def test_the_teacher_has_the_gpus_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the teacher would be on a GPU of the pools, or on none."""
    config = load_config(None, ["model.path=m", "data.train_files=[a]", "trainer.run_dir=r"])
    gpus = [GpuInfo(id=str(i), uuid=f"GPU-{i}") for i in range(4)]
    monkeypatch.setattr(own_teacher, "machine_gpus", lambda: gpus)
    monkeypatch.setattr(own_teacher, "resolve_device", lambda config: "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "", "2,3"), ({"cluster.gpus": [0, 3]}, "", "1,2"),
        ({}, "1", "1"), ({"rollout.n_gpus_per_node": 2}, "", "3"),
    ]  # fmt: skip
    for changes, given, expected in cases:
        assert own_teacher.teacher_flags(config.with_values(changes), given)[-2:] == ["--gpus", expected]
    with refuses("--teacher-gpus"):
        own_teacher.teacher_flags(config.with_values({"rollout.n_gpus_per_node": 3}), "")
    monkeypatch.setattr(own_teacher, "resolve_device", lambda config: "cpu")
    assert own_teacher.teacher_flags(config, "") == ["--device", "cpu"]
    with refuses("--teacher-gpus"):
        own_teacher.teacher_flags(config, "0")


def test_the_first_file_has_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if `gkd init` writes a key that does not exist or another value than the default, or replaces a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["gkd init", "mine.yaml"])
    assert init.main() == 0
    config = load_config("mine.yaml")
    differing = {name for name, value in yaml_values("mine.yaml").items() if value != all_keys()[name].default}
    assert {*differing} <= {"data.train_files", "model.path", "trainer.run_dir", "trainer.total_epochs"}
    assert config.trainer.run_dir == "runs/mine"
    assert init.main() == 2 and load_config("mine.yaml") == config


def test_settings_of_python_are_those_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a mapping that is a value is taken for a section, or a text for another type."""
    given: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train_files": ["a"], "chat_template_kwargs": {"enable_thinking": False}, "system_prompt": "on"},
        "trainer": {"run_dir": str(tmp_path)},
        "actor": {"optim": {"lr": 1e-4}},
    }
    seen: list[Any] = []

    def run(config: Any, closing: Any) -> None:
        seen.append(config)
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')

    monkeypatch.setattr(api, "run", run)
    monkeypatch.setattr(api, "Closing", lambda *args: SimpleNamespace(print=lambda code: None))
    finished = api.train(**given)
    assert (finished.folder, finished.metrics, finished.export) == (tmp_path, {"step": 2}, tmp_path / "export")
    data, optim = seen[0].data, seen[0].actor.optim
    assert (data.chat_template_kwargs, data.system_prompt, optim.lr) == ({"enable_thinking": False}, "on", 1e-4)
