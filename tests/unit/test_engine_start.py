"""Test what vLLM gets at the start of rollout engines and of the teacher server, and what a killed engine leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gkd.cluster.cluster import Cluster
from gkd.cluster.stacks import rank_env
from gkd.config.load import load_config
from gkd.rollout.vllm.start import engine_folder, link_shared_memory, remove_files, start_vllm
from teacher_server.cli import worker
from teacher_server.config.schema import GivenSettings
from teacher_server.config.settings import flag_of, given_flags, settings_from
from teacher_server.engines import load


class Given(BaseException):
    """The arguments that vLLM was called with."""


def stop(**arguments: Any) -> None:
    raise Given(arguments)


@pytest.fixture(autouse=True)
def _restored_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engines set variables for their process, of which one disables torch.compile, and change vLLM's executors."""
    executors = SimpleNamespace(multiproc_executor=SimpleNamespace(), uniproc_executor=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.v1.executor", executors)
    before = dict(os.environ)
    os.environ |= {"VLLM_NO_USAGE_STATS": "0", "VLLM_USE_MODELSCOPE": "True", "VLLM_MODEL_REDIRECT_PATH": "x"}
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(("device", "mib", "expected"), [("cpu", 0, 256), ("cuda", 0, None), ("cuda", 1024, 1024)])
def test_a_rollout_engine_gets_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, mib: int, expected: int | None
) -> None:
    """Fails if rollout.kv_cache_mib does not reach vLLM on one of the devices, or 0 is taken as a size.

    With a size vLLM must not require rollout.gpu_memory_utilization of a shared GPU to be free.
    """
    model_config = SimpleNamespace(
        create_model_config=lambda: SimpleNamespace(is_hybrid=False, is_attention_free=False)
    )
    registry = SimpleNamespace(get_supported_archs=lambda: {"GPT2LMHeadModel", "GemmaForCausalLM"})
    fake = SimpleNamespace(
        LLM=stop, EngineArgs=lambda *_, **__: model_config, ModelRegistry=registry, SamplingParams=dict
    )
    monkeypatch.setitem(sys.modules, "vllm", fake)
    config = load_config(None, [f"rollout.kv_cache_mib={mib}"]).rollout
    model: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8, "trust_remote_code": False}
    named = '["GemmaForCausalLM"]' if mib else "null"  # none, or one of another family
    (tmp_path / "config.json").write_text(f'{{"model_type": "gpt2", "architectures": {named}}}')
    with pytest.raises(Given) as found:
        start_vllm(str(tmp_path), config, **model, device=device, enable_sleep_mode=False, lora=None)
    check_arguments(found.value.args[0], device, expected)
    assert found.value.args[0]["hf_overrides"] == {"architectures": ["GPT2LMHeadModel"]}


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [("cpu", {}, 0), ("cpu", {"kv_cache_mib": "64"}, 64), ("cuda", {}, None), ("cuda", {"kv_cache_mib": "1024"}, 1024)],
)
def test_a_teacher_engine_gets_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, flags: dict[str, str], expected: int | None
) -> None:
    """Fails if --kv-cache-mib does not reach vLLM on one of the devices, or 0 is a size on a GPU; as for rollouts."""
    platform = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: device == "cpu"))
    fake = SimpleNamespace(EngineArgs=stop, LLMEngine=None, __spec__="it is installed")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platform)
    batch = SimpleNamespace(InputBatch=make_dataclass("InputBatch", []))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu", SimpleNamespace(input_batch=batch))
    monkeypatch.setattr(load, "resolve_device", lambda device: device)
    given = given_flags(SimpleNamespace(**flags), GivenSettings)  # type: ignore[arg-type]
    settings = settings_from(GivenSettings, [given, {"engine": "vllm", "device": device}], flag_of)
    (tmp_path / "config.json").write_text("{}")
    folder = SimpleNamespace(path=str(tmp_path), max_tokens=16)
    with pytest.raises(Given) as found:
        worker._load(folder, settings)  # type: ignore[arg-type]
    check_arguments(found.value.args[0], device, expected)


def check_arguments(arguments: dict[str, Any], device: str, mib: int | None) -> None:
    """Check memory, and that vLLM reports nothing to its makers and loads no other model than the folder's."""
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert not {"VLLM_USE_MODELSCOPE", "VLLM_MODEL_REDIRECT_PATH"} & os.environ.keys()
    assert arguments.get("kv_cache_memory_bytes") == (None if mib is None else mib << 20)
    share = arguments.get("gpu_memory_utilization")
    if device == "cpu":
        assert share is None
    else:
        assert share == 0.85 if mib is None else 0 < share <= 0.01


def test_ray_sends_no_usage_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the Ray that a run starts reports the cluster to Ray's server, or has too few CPUs for the slots
    of a GPU machine with few cores.
    """
    import ray
    from ray._common.usage.usage_lib import usage_stats_enabled

    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_AUTO_CONNECT"):
        monkeypatch.setenv(name, "1")
    assert usage_stats_enabled()
    seen: list[tuple[bool, int]] = []
    monkeypatch.setattr(ray, "init", lambda *_, **given: seen.append((usage_stats_enabled(), given["num_cpus"])))
    Cluster("", n_slots=64, on_cpu=False).close()
    assert [usage for usage, _ in seen] == [False] and seen[0][1] >= 64 * 1.1


RUN = "0123456789abcdef"
SHARED_MEMORY = Path("/dev/shm")
# An engine with one child. Both map memory, and the child has a semaphore that its sibling could open by name.
CHILD = """
import multiprocessing, threading
from multiprocessing.shared_memory import SharedMemory
memory, lock = SharedMemory(create=True, size=64), multiprocessing.get_context("spawn").Lock()
print(memory.name, "sem." + lock._semlock.name.strip("/"), flush=True)
threading.Event().wait()
"""
ENGINE = f"""
import subprocess, sys, threading
from multiprocessing.shared_memory import SharedMemory
from gkd.rollout.vllm.start import engine_folder, link_shared_memory
memory = SharedMemory(create=True, size=64)
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
names = child.stdout.readline()
engine_folder().mkdir()
(engine_folder() / "socket").touch()
link_shared_memory(engine_folder())
link_shared_memory(engine_folder())  # as at the end of a run
print(memory.name, names, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def killed_engine(
    tmp_path: Path, temporary_is: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Path]]:
    """Kill all processes of an engine, and yield the names in /dev/shm that they have left."""
    temporary_is(tmp_path)
    for name, value in rank_env(RUN, "rollout engine 3").items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", ENGINE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as engine:
        left = [SHARED_MEMORY / name for name in engine.stdout.readline().split()]
        os.killpg(engine.pid, signal.SIGKILL)  # with multiprocessing's trackers, which would remove the names
    assert len(left) == 3 and all(path.exists() for path in left)
    yield left
    for path in left:
        path.unlink(missing_ok=True)


def test_the_driver_removes_what_a_killed_engine_has_left(killed_engine: list[Path], tmp_path: Path) -> None:
    """If it fails, each engine that is killed keeps memory until the host is booted, or the end of a run removes the
    files of another run.
    """
    other = SharedMemory(create=True, size=64)
    try:
        others = tmp_path / engine_folder().name.replace(RUN[:8], "76543210")
        others.mkdir()
        link_shared_memory(others)  # this process has not mapped what the engine has left
        linked = {path.name for path in others.iterdir()}
        assert other.name in linked and linked.isdisjoint(path.name for path in killed_engine)
        remove_files(engine_folder(f"{RUN}/*"))
        assert not any(path.exists() for path in killed_engine)
        assert not engine_folder().exists()
        assert list(tmp_path.iterdir()) == [others] and (SHARED_MEMORY / other.name).exists()
    finally:
        other.close()
        other.unlink()


def test_the_next_process_of_the_slot_removes_what_a_killed_engine_has_left(killed_engine: list[Path]) -> None:
    """If it fails, an engine that is started again cannot start, or its predecessors fill /dev/shm during the run."""
    killed_engine[0].unlink()  # part of it may be gone
    remove_files(engine_folder())
    assert not engine_folder().exists() and not any(path.exists() for path in killed_engine)
    remove_files(engine_folder())  # and all of it
