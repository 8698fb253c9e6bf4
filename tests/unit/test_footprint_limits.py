"""Shortages: fixes that are verified, and the KV cache that an engine allocates on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from gkd.config.check import check_config
from gkd.config.schema import Config
from gkd.errors import ConfigError, ModelError
from gkd.footprint import RankFootprint, check, footprint
from gkd.footprint.report import as_json, footprint_table
from gkd.footprint.rollout import with_engine_cache
from tests.unit.test_footprint import EXPERTS, GIB, QWEN25_15B, SIZES, TP2, _actor, _config

MOE = {"model_type": "qwen3_moe", **SIZES, **EXPERTS, "head_dim": 8}


def _refit(config: Config) -> tuple[RankFootprint, ...]:
    return footprint(config, QWEN25_15B)


def _fixes(problem: str) -> dict[str, float]:
    """GiB that each fix saves, by its text."""
    pairs = (fix.partition(": saves ")[::2] for fix in problem.partition("Fix: ")[2].split("; "))
    return {what: float(saved.split()[0]) for what, saved in pairs if saved}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        TP2,  # 2 key heads: no further
        ("actor.strategy=fsdp2",),
        ("actor.max_tokens_per_micro_batch=1600",),  # a sequence has 1536
        ("actor.max_tokens_per_micro_batch=0", "actor.micro_batch_size=1"),
        ("trainer.n_gpus_per_node=2", "actor.pp=2", "actor.fused_lm_head=false"),
        ("cluster.gpus=[0,1,2,3]",),  # there are no more
    ],
)
@pytest.mark.parametrize("gpu_bytes", [3 * GIB, 24 * GIB])
def test_fixes_are_verified(overrides: tuple[str, ...], gpu_bytes: int) -> None:
    """Fails if a fix is refused by check_config or by the model, or does not save what it promises."""
    config = _config(*overrides)
    before = footprint(config, QWEN25_15B)
    (problem, *_) = check(before, gpu_bytes, config, _refit)
    fixes = _fixes(problem)
    assert fixes or "a larger GPU" in problem, problem
    for text, saved in fixes.items():
        changed = _config(*overrides, *(change.replace(" ", "=") for change in text.split(" with ")))
        check_config(changed)
        after = footprint(changed, QWEN25_15B)
        assert (before[0].total_bytes - after[0].total_bytes) / GIB == pytest.approx(saved, abs=0.006), text
        assert saved > 0, text


def test_impossible_fixes_are_left_out() -> None:
    """Fails if a fix is impossible: a budget smaller than a sequence, more ranks than key heads."""
    (problem,) = check(
        _refit(config := _config("actor.max_tokens_per_micro_batch=1536", *TP2)), 9 * GIB, config, _refit
    )
    assert "max_tokens_per_micro_batch" not in problem and "actor.tp 4" not in problem
    assert "actor.sequence_parallel true" in problem


def test_fixes_of_an_engine() -> None:
    """Fails if an engine's fix takes more of the GPU than it needs, or GPUs that do not exist."""
    config = _config("rollout.gpu_memory_utilization=0.5")
    (problem,) = [p for p in check(_refit(config), 10 * GIB, config, _refit) if p.startswith("rollout")]
    assert "rollout.gpu_memory_utilization 0.52: saves 0.20 GiB, enough" in problem
    # 3 GPUs are not a multiple of 2; 12 heads can be cut in 2, and the pool must have 6.
    assert "rollout.tp 2 with rollout.n_gpus_per_node 6" in problem and "rollout.tp 2:" not in problem


def test_each_shortage_has_its_own_fixes() -> None:
    """Fails if the fixes of a weight sync without room only help the cache."""
    config = _config("weight_sync.bucket_mib=2048")
    cache, sync = [p for p in check(_refit(config), 3 * GIB, config, _refit) if p.startswith("rollout")]
    assert "one sequence of 1536 tokens" in cache and "rollout.tp 2" in cache and "bucket_mib" not in cache
    assert "a bucket of 2.00 GiB" in sync and "rollout.tp" not in sync
    assert "weight_sync.bucket_mib 1024: saves 1.00 GiB" in sync


def test_an_engines_row_on_a_gpu() -> None:
    """Fails if an engine's total is not its share of the GPU, or the maximum cache is missing."""
    config = _config()
    before = footprint(config, QWEN25_15B)
    engine = with_engine_cache(before, 80 * GIB, config)[-1]
    assert engine.total_bytes == round(0.85 * 80 * GIB)
    assert engine.parts["kv_max"] == before[-1].parts["kv_cache"] == 167 * 1536 * 28672
    assert with_engine_cache(before, None, config) == list(before)
    assert with_engine_cache(before, 2 * GIB, config)[-1].parts["kv_cache"] == 0
    assert check(with_engine_cache(before, 3 * GIB, config), 3 * GIB, config) == check(before, 3 * GIB, config)
    header, _, row, _ = footprint_table([before[0], engine], 80 * GIB).splitlines()
    assert header.split()[-1] == "kv_max" and row.split()[-1] == "6.85"
    assert row.split()[-4:-2] == ["80.00", "85%"]
    published = as_json([before[0], engine], 80 * GIB, [], {})
    assert published["ranks"][1]["parts"]["kv_wanted"] == engine.parts["kv_max"]
    assert published["ranks"][0]["parts"]["passing"] == before[0].parts["transient"] and published["card_bytes"]


@pytest.mark.parametrize(
    ("words", "overrides", "model"),
    [
        ("actor.ep = 2", ("actor.ep=2", "trainer.n_gpus_per_node=2"), QWEN25_15B),
        ("sequence_parallel", TP2, MOE),
        ("does not divide the 3 ranks", ("actor.ep=2", "trainer.n_gpus_per_node=3"), MOE),
        (
            "80 MLP columns",
            ("actor.tp=3", "trainer.n_gpus_per_node=3"),
            {**SIZES, "model_type": "llama", "num_key_value_heads": 6},
        ),
        (
            "sliding_window = 4096",
            ("data.max_response_length=8192", "actor.max_tokens_per_micro_batch=0"),
            {**SIZES, "model_type": "mistral"},
        ),
        ("hidden_act = 'gelu'", (), {**QWEN25_15B, "hidden_act": "gelu"}),
        ("use_sliding_window", (), {**QWEN25_15B, "use_sliding_window": True}),
        ("12 attention heads", ("rollout.tp=5", "rollout.n_gpus_per_node=5"), QWEN25_15B),
        ("rollout.tp = 3", ("rollout.tp=3",), {**QWEN25_15B, "intermediate_size": 9000}),
    ],
)
def test_models_and_splits_that_the_run_refuses(words: str, overrides: tuple[str, ...], model: dict[str, Any]) -> None:
    """Fails if an estimate is printed for a model or split that the actor or the engines refuse."""
    with pytest.raises((ConfigError, ModelError), match=words):
        footprint(_config(*overrides), model)


def test_a_window_that_is_long_enough() -> None:
    """Fails if a mistral with a null window, or one that no sequence reaches, is refused."""
    mistral = {**SIZES, "model_type": "mistral"}
    for window in (None, 1536):
        assert _actor(shape={**mistral, "sliding_window": window}).state_bytes > 0
