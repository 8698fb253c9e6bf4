"""The KV cache that an engine allocates on a GPU, and models and splits that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from gkd.errors import ConfigError, ModelError
from gkd.footprint import check, footprint
from gkd.footprint.report import as_json, footprint_table
from gkd.footprint.rollout import with_engine_cache
from tests.unit.test_footprint import EXPERTS, GIB, QWEN25_15B, SIZES, TP2, _actor, _config

MOE = {"model_type": "qwen3_moe", **SIZES, **EXPERTS, "head_dim": 8}


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
