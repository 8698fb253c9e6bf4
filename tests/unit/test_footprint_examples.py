"""The shipped examples on cards of 80 GB and 141 GB, and GPUs that other processes use as well."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import ConfigError
from gkd.memory.footprint import check, footprint, teacher_footprint
from gkd.memory.footprint.combination import find_combination
from gkd.memory.footprint.limits import smallest_margin
from gkd.memory.footprint.rank import other_processes_bytes, with_other_processes
from gkd.preflight import memory as preflight_memory
from tests.unit.test_footprint import GIB, QWEN25_15B, _config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# What torch reports of an H100 and of an H200.
CARDS = {"80 GB": round(79.1 * GIB), "141 GB": round(139.8 * GIB)}
TINY: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
}
MODELS = {"gsm8k_qwen2.5_1.5b": QWEN25_15B}  # the others train the quickstart's model


def found_of(config: Config, model: dict[str, Any], gpu_bytes: int, in_use: int = 0) -> list[Any]:
    others = other_processes_bytes(config, gpu_bytes, in_use)
    return with_other_processes(footprint(config, model), others, config)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", sorted(file.stem for file in CONFIGS.glob("*.yaml")))
def test_the_shipped_examples_fit_with_the_margin(name: str, card: str) -> None:
    """Fails if a user's first run of an example may end out of memory on a common card."""
    config, gpu_bytes = load_config(CONFIGS / f"{name}.yaml"), CARDS[card]
    if config.trainer.device == "cpu":
        return
    found = found_of(config, MODELS.get(name, TINY), gpu_bytes)
    assert check(found, gpu_bytes, config) == [] and config.memory.margin == 0.1
    assert smallest_margin(found, gpu_bytes, config)[1] >= 0.1


def test_the_example_fits_although_the_prediction_may_be_too_low() -> None:
    """Fails if the 1.5B example leaves less on 80 GB than the prediction's known error of 15%."""
    config = load_config(CONFIGS / "gsm8k_qwen2.5_1.5b.yaml")
    assert footprint(config, QWEN25_15B)[0].total_bytes * 1.15 < CARDS["80 GB"]
    plain = footprint(_config("actor.layers=torch"), QWEN25_15B)[0].total_bytes
    assert plain > 0.9 * CARDS["80 GB"], "16384 tokens are too many without fused layers"
    assert check(footprint(_config(), QWEN25_15B), CARDS["141 GB"], config) == []


def test_what_others_have_of_a_gpu_counts_in_every_phase() -> None:
    """Fails if a teacher server on the same card is left out of a phase, or counted twice on a shared GPU."""
    gpu_bytes = 80 * GIB
    for overrides in ((), ("trainer.colocate=true", "rollout.n_gpus_per_node=1")):
        alone, beside = _config(*overrides), _config(*overrides, "cluster.teacher_gpu_share=0.1")
        before, after = found_of(alone, QWEN25_15B, gpu_bytes), found_of(beside, QWEN25_15B, gpu_bytes)
        for phase, size in before[0].phases().items():
            assert after[0].phases()[phase] == size + 8 * GIB
        engine = 0 if alone.trainer.colocate else 8 * GIB
        assert after[-1].total_bytes - before[-1].total_bytes == engine
        assert after[-1].parts["kv_cache"] == before[-1].parts["kv_cache"], "vLLM's share is one of the whole GPU"
        assert find_combination(beside, lambda changed: found_of(changed, QWEN25_15B, gpu_bytes), gpu_bytes).fits
    full = _config("rollout.gpu_memory_utilization=0.9", "cluster.teacher_gpu_share=0.1", "memory.margin=0")
    (problem,) = [line for line in check(found_of(full, QWEN25_15B, 90 * GIB), 90 * GIB, full) if "rollout" in line]
    assert "other processes, 9.00 GiB" in problem
    assert other_processes_bytes(full, 90 * GIB, 30 * GIB) == 30 * GIB and other_processes_bytes(full, None) == 0
    on_cpu = replace(full, trainer=replace(full.trainer, device="cpu"))
    assert with_other_processes(before, 1, on_cpu) == before


def test_the_teacher_fits_into_its_share() -> None:
    """Fails if a share that the teacher's weights exceed passes."""
    teacher = teacher_footprint(QWEN25_15B, n_tokens=1536)
    for share, is_enough in ((0.1, True), (0.02, False)):
        config = _config(f"cluster.teacher_gpu_share={share}", "actor.recompute=full")
        problems = check([*footprint(config, QWEN25_15B), teacher], 80 * GIB, config)
        assert ([line for line in problems if "teacher rank 0" in line] == []) == is_enough
        assert smallest_margin([*footprint(config, QWEN25_15B), teacher], 80 * GIB, config)[0] == "actor rank 0"


@pytest.mark.parametrize(
    ("free", "overrides", "in_use"),
    [
        ((80, 80), (), 0),
        ((80 - 0.5, 80), (), 0),  # the driver's own
        ((80 - 12, 80), (), 12),
        ((80, 80 - 12), (), 12),
        ((80 - 12, 80), ("cluster.gpus=[1]", "trainer.colocate=true", "rollout.n_gpus_per_node=1"), 0),
        ((80, 80 - 12), ("trainer.colocate=true", "rollout.n_gpus_per_node=1"), 0),  # Ray assigns the lowest one
        ((80 - 12, 80), ("cluster.ray_address=h:1",), 0),  # the GPUs are on other hosts
    ],
)
def test_preflight_counts_what_is_on_the_card(
    tmp_path: Path, host_has: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, gkd_log: pytest.LogCaptureFixture,
    free: tuple[float, ...], overrides: tuple[str, ...], in_use: int,
) -> None:  # fmt: skip
    """Fails if a teacher server or a stranger on a card of the pools is not counted, or one on another card is."""
    rows = [f"{i}, GPU-{i}, C, 00000000:{i:02x}:00.0, {80 << 10}, {int(size * 1024)}" for i, size in enumerate(free)]
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\ncase "$1" in *gpu=*) cat <<END\n' + "\n".join(rows) + "\nEND\n;; esac\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = _config("actor.layers=torch", f"model.path={tmp_path}", "rollout.n_gpus_per_node=1", *overrides)
    assert preflight_memory.memory_in_use(config) == in_use * GIB
    if in_use and not config.cluster.gpus:
        (tmp_path / "config.json").write_text(json.dumps(QWEN25_15B))
        monkeypatch.setattr(preflight_memory, "smallest_gpu", lambda cluster: 80 * GIB)
        host_has(512)
        preflight_memory.check_memory(config, "cuda", None)
        assert "other_processes" in gkd_log.text and "actor rank 0 needs 87.17 GiB" in gkd_log.text


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("cluster.teacher_gpu_share", ("teacher.backend=local", "teacher.path=t")),
        ("rollout.gpu_memory_utilization", ("rollout.gpu_memory_utilization=0.95",)),
    ],
)
def test_shares_that_cannot_be_are_refused(key: str, overrides: tuple[str, ...]) -> None:
    """Fails if shares of more than a whole GPU, or one of a server that does not exist, are accepted.

    An engine whose KV cache has a given size takes no share.
    """
    from gkd.config.check import check_config

    settings = ["data.train_files=[a]", "model.path=s", "trainer.run_dir=r", "cluster.teacher_gpu_share=0.1"]
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(None, [*settings, *overrides]))
    assert caught.value.key == key
    check_config(load_config(None, [*settings, "rollout.gpu_memory_utilization=0.95", "rollout.kv_cache_mib=64"]))
