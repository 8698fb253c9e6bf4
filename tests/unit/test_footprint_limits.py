"""The KV cache that an engine allocates on a GPU, and models and splits that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gkd.errors import ConfigError, ModelError
from gkd.hf.model_dims import read_dims
from gkd.memory.footprint import check, footprint
from gkd.memory.footprint.combination import find_combination
from gkd.memory.footprint.limits import smallest_margin
from gkd.memory.footprint.report import as_json, footprint_table
from gkd.memory.footprint.rollout import kv_bytes_per_token, kv_room_bytes, with_engine_cache, with_max_num_seqs
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


def test_the_room_of_the_kv_cache() -> None:
    """Fails if the cache's room is not what utilization leaves after weights, a forward pass and the context."""
    config = _config()
    engine = footprint(config, QWEN25_15B)[-1]
    room = kv_room_bytes(engine, 80 * GIB, config)
    others = sum(engine.parts[name] for name in ("weights", "activations", "logits", "context"))
    assert room == round(0.85 * 80 * GIB) - others
    # A key or value head is never cut; with more ranks than heads they are repeated.
    assert kv_bytes_per_token(_config("rollout.tp=2"), read_dims(QWEN25_15B)) == 14336
    assert kv_bytes_per_token(_config("rollout.tp=4"), read_dims(QWEN25_15B)) == 14336


def test_a_kv_cache_of_a_given_size() -> None:
    """Fails if an engine whose KV cache has a given size is predicted with its share of the GPU."""
    config = _config("rollout.kv_cache_mib=3072")
    automatic, before = footprint(_config(), QWEN25_15B)[-1], footprint(config, QWEN25_15B)
    engine = with_engine_cache(before, 80 * GIB, config)[-1]
    assert engine.parts == {**automatic.parts, "kv_cache": 3 * GIB, "kv_max": automatic.parts["kv_cache"]}
    assert before[-1].parts == engine.parts, "it does not depend on the GPU"
    assert check(before, 80 * GIB, config) == []
    larger = _config("rollout.kv_cache_mib=61440")
    name, free = smallest_margin(footprint(larger, QWEN25_15B), 80 * GIB, larger)
    assert name == "rollout rank 0" and free == pytest.approx(1 - (engine.total_bytes + 57 * GIB) / (80 * GIB))
    share = _config("rollout.kv_cache_mib=3072", "rollout.gpu_memory_utilization=0.99")
    assert check(before, 80 * GIB, share) == [], "no share has to leave room for the buckets"
    (problem,) = [line for line in check(before, 4 * GIB, config) if line.startswith("rollout")]
    assert f"{engine.total_bytes / GIB:.2f} GiB" in problem
    small = _config("rollout.kv_cache_mib=16")
    (problem,) = check(footprint(small, QWEN25_15B), 80 * GIB, small)
    lack = 1536 * 28672 - (16 << 20)
    assert f"{lack / GIB:.2f} GiB" in problem
    found = find_combination(small, lambda changed: footprint(changed, QWEN25_15B), 80 * GIB)
    assert found.fits and found.overrides == ["rollout.kv_cache_mib=64"]
    large = _config("rollout.kv_cache_mib=131072")
    found = find_combination(large, lambda changed: footprint(changed, QWEN25_15B), 80 * GIB)
    assert found.fits and found.overrides == ["rollout.kv_cache_mib=65536"]


AUTO = ("rollout.max_num_seqs=0", "rollout.n_gpus_per_node=1", "trainer.global_batch_size=4096")


@pytest.mark.parametrize(
    ("overrides", "card_gib", "expected"),
    [
        (AUTO, 80, 1024),  # the most
        (AUTO, 24, None),
        ((*AUTO, "model.dtype=float32"), 24, None),
        ((*AUTO, "data.max_response_length=7680"), 80, None),
        (AUTO, 6, 128),  # the least
        ((*AUTO, "trainer.global_batch_size=700"), 80, 700),  # all that the run has
        ((*AUTO, "rollout.max_num_seqs=40"), 80, 40),
        ((*AUTO, "rollout.kv_cache_mib=10500"), 80, 250),  # 42 MiB each
        (AUTO, None, 128),
    ],
)
def test_the_number_of_sequences_follows_from_the_kv_cache(
    overrides: tuple[str, ...], card_gib: int | None, expected: int | None
) -> None:
    """Fails if a GPU decodes fewer sequences than it has room for, or more, which vLLM preempts."""
    config, dims = _config(*overrides), read_dims(QWEN25_15B)
    gpu_bytes = None if card_gib is None else card_gib * GIB
    settled = with_max_num_seqs(config, footprint(config, QWEN25_15B)[-1], dims, gpu_bytes)
    found = settled.rollout.max_num_seqs
    assert found == settled.rollout.sequence_limit
    if expected is not None or gpu_bytes is None:
        assert found == expected
        return
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert 128 < found < 1024
    for n, is_enough in ((found, True), (found + 1, False)):
        changed = replace(settled, rollout=replace(settled.rollout, max_num_seqs=n))
        room = kv_room_bytes(footprint(changed, QWEN25_15B)[-1], gpu_bytes, changed)
        assert (room >= n * longest * kv_bytes_per_token(changed, dims)) == is_enough, n


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
