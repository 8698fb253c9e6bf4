"""Test that no process reports usage statistics to the makers of a library."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gkd.cluster.cluster import Cluster
from gkd.config.schema_rollout import RolloutConfig
from gkd.rollout.vllm.start import start_vllm
from teacher_server.engines.vllm import set_vllm_environment


def test_vllm_sends_no_usage_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a rollout engine or a teacher worker calls vLLM's server from a user's cluster.

    `tests/e2e/test_rollout_engine.py` asserts that vLLM itself reads this variable so.
    """
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "0")  # restores it after the test
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seen: list[str] = []

    def llm(**settings: Any) -> None:
        seen.append(os.environ["VLLM_NO_USAGE_STATS"])

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=llm))
    executors = SimpleNamespace(multiproc_executor=SimpleNamespace(), uniproc_executor=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.v1.executor", executors)
    model: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8, "device": "cuda", "trust_remote_code": False}
    start_vllm("x", RolloutConfig(), **model, enable_sleep_mode=False, lora=None)
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    set_vllm_environment("cuda", 1)
    assert [*seen, os.environ["VLLM_NO_USAGE_STATS"]] == ["1", "1"]


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
