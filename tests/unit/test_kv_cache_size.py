"""The size of the KV cache as vLLM gets it, in rollout engines and in the teacher server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gkd.config.load import load_config
from gkd.rollout.vllm.start import start_vllm
from teacher_server.cli import worker
from teacher_server.config.options import given_flags
from teacher_server.config.schema import TEACHER_OPTIONS
from teacher_server.engines import load
from teacher_server.engines import vllm as teacher_vllm
from teacher_server.errors import SettingsError


class Given(Exception):
    """The arguments that vLLM was called with."""


def stop(**arguments: Any) -> None:
    raise Given(arguments)


@pytest.fixture(autouse=True)
def _restored_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engines set variables for their process, of which one disables torch.compile, and change vLLM's executors."""
    executors = SimpleNamespace(multiproc_executor=SimpleNamespace(), uniproc_executor=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.v1.executor", executors)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("device", "mib", "expected"), [("cpu", 0, 256), ("cpu", 64, 64), ("cuda", 0, None), ("cuda", 1024, 1024)]
)
def test_a_rollout_engine_gets_the_size(
    monkeypatch: pytest.MonkeyPatch, device: str, mib: int, expected: int | None
) -> None:
    """Fails if rollout.kv_cache_mib does not reach vLLM on one of the devices, or 0 is taken as a size.

    With a size vLLM must not require rollout.gpu_memory_utilization of a shared GPU to be free.
    """
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=stop))
    config = load_config(None, [f"rollout.kv_cache_mib={mib}"]).rollout
    model: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8, "trust_remote_code": False}
    with pytest.raises(Given) as found:
        start_vllm("x", config, **model, device=device, enable_sleep_mode=False, lora=None)
    check_arguments(found.value.args[0], device, expected)


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [("cpu", {}, 7), ("cpu", {"kv_cache_mib": "64"}, 64), ("cuda", {}, None), ("cuda", {"kv_cache_mib": "1024"}, 1024)],
)
def test_a_teacher_engine_gets_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, flags: dict[str, str], expected: int | None
) -> None:
    """Fails if --kv-cache-mib does not reach vLLM on one of the devices, or 0 is taken as a size; as for rollouts."""
    platform = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: device == "cpu"))
    errors = SimpleNamespace(VLLMError=LookupError)
    fake = SimpleNamespace(EngineArgs=stop, LLMEngine=None, exceptions=errors, __spec__="it is installed")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platform)
    batch = SimpleNamespace(InputBatch=make_dataclass("InputBatch", []))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu", SimpleNamespace(input_batch=batch))
    monkeypatch.setattr(teacher_vllm, "_kv_cache_mib", lambda *model: 7)
    monkeypatch.setattr(load, "resolve_device", lambda device: device)
    values = {each.key: each.default for each in TEACHER_OPTIONS}
    values |= given_flags(SimpleNamespace(**flags), TEACHER_OPTIONS)  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text("{}")
    folder = SimpleNamespace(path=str(tmp_path), max_tokens=16)
    with pytest.raises(Given) as found:
        worker._load(folder, {**values, "engine": "vllm", "device": device})  # type: ignore[arg-type]
    check_arguments(found.value.args[0], device, expected)


def check_arguments(arguments: dict[str, Any], device: str, mib: int | None) -> None:
    assert arguments.get("kv_cache_memory_bytes") == (None if mib is None else mib << 20)
    share = arguments.get("gpu_memory_utilization")
    if device == "cpu":
        assert share is None
    else:
        assert share == 0.85 if mib is None else 0 < share <= 0.01


@pytest.mark.parametrize("value", ["-1", "1.5", "many"])
def test_a_wrong_size_of_the_teacher_is_an_error(value: str) -> None:
    """Fails if a size that is none is accepted, or its error does not contain the flag."""
    with pytest.raises(SettingsError, match="--kv-cache-mib"):
        given_flags(SimpleNamespace(kv_cache_mib=value), TEACHER_OPTIONS)  # type: ignore[arg-type]
