"""Test what an engine allocates on a GPU, the phases of a GPU that it shares with an actor rank, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gkd.config.schema import Config
from gkd.errors import ConfigError, ModelError
from gkd.hf.model_dims import read_dims
from gkd.memory.footprint import check
from gkd.memory.footprint.combination import find_combination
from gkd.memory.footprint.estimate import footprint
from gkd.memory.footprint.limits import smallest_margin
from gkd.memory.footprint.rank import RankFootprint, shared_phases
from gkd.memory.footprint.report import as_json, footprint_table, kv_line, shared_phases_table
from gkd.memory.footprint.rollout import kv_bytes_per_token, kv_room_bytes, with_engine_cache, with_max_num_seqs
from gkd.tools import memory
from tests.unit.test_footprint import EXPERTS, GIB, QWEN25_15B, SIZES, TP2, _config

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
    # A key or value head is never cut; with more ranks than heads they are repeated.
    for tp in (2, 4):
        assert kv_bytes_per_token(_config(f"rollout.tp={tp}"), read_dims(QWEN25_15B)) == 14336


def test_the_length_of_an_engine_that_is_the_teacher() -> None:
    """Fails if a message about the cache names a shorter sequence than the one that it was computed for."""
    words = ("teacher.backend=rollout", "data.teacher_prompt_key=t", "data.max_teacher_prompt_length=4096")
    config = _config(*words, "trainer.colocate=false")
    longest = config.derived.max_engine_length
    assert longest > config.derived.max_sequence_length
    found = footprint(config, QWEN25_15B)
    assert any(f"one sequence of {longest} tokens" in problem for problem in check(found, 3 * GIB, config))
    line = kv_line(found, read_dims(QWEN25_15B), 80 * GIB, config)
    room = kv_room_bytes(found[-1], 80 * GIB, config) // kv_bytes_per_token(config, read_dims(QWEN25_15B))
    assert f"{longest} tokens" in line and f"({room // longest} such" in line


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
        (AUTO, 6, 128),  # the least
        ((*AUTO, "trainer.global_batch_size=700"), 80, 700),  # all that the run has
        ((*AUTO, "rollout.max_num_seqs=40"), 80, 40),
        ((*AUTO, "rollout.kv_cache_mib=10500"), 80, 250),  # 42 MiB each
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
        ("sequence_parallel", TP2, MOE),
        ("does not divide the 3 ranks", ("actor.ep=2", "trainer.n_gpus_per_node=3"), MOE),
        (
            "80 MLP columns",
            ("actor.tp=3", "trainer.n_gpus_per_node=3"),
            {**SIZES, "model_type": "llama", "num_key_value_heads": 6},
        ),
        ("use_sliding_window", (), {**QWEN25_15B, "use_sliding_window": True}),
        ("12 attention heads", ("rollout.tp=5", "rollout.n_gpus_per_node=5"), QWEN25_15B),
        ("rollout.tp = 3", ("rollout.tp=3",), {**QWEN25_15B, "intermediate_size": 9000}),
    ],
)
def test_models_and_splits_that_the_run_refuses(words: str, overrides: tuple[str, ...], model: dict[str, Any]) -> None:
    """Fails if an estimate is printed for a model or split that the actor or the engines refuse."""
    with pytest.raises((ConfigError, ModelError), match=words):
        footprint(_config(*overrides), model)


COLOCATED = ("trainer.colocate=true", "trainer.n_gpus_per_node=1", "rollout.n_gpus_per_node=1")
LOCAL = ("teacher.backend=local", "teacher.path=t")


def refit(config: Config) -> tuple[RankFootprint, ...]:
    local = (QWEN25_15B, None) if config.teacher.backend == "local" else None
    return footprint(config, QWEN25_15B, local_teacher=local)


def found_phases(config: Config, gpu_bytes: int) -> dict[str, int]:
    actor, *_, engine = with_engine_cache(refit(config), gpu_bytes, config)
    return shared_phases(actor, engine, gpu_bytes, config)


def test_each_phase_counts_what_is_on_the_gpu() -> None:
    """Fails if offloaded memory is counted, or the second copy of a weight sync is not."""
    config = _config(*COLOCATED, *LOCAL, "rollout.gpu_memory_utilization=0.5")
    actor, engine = refit(config)
    found = found_phases(config, 80 * GIB)
    a, e = actor.parts, engine.parts
    context = a["context"]
    states = a["weights"] + a["gradients"] + a["optimizer"]
    training = states + a["activations"] + a["logits"] + a["transient"]
    assert found == {
        "generate": 40 * GIB + context,
        "training_step": training + 2 * context,
        "optimizer_step": states + a["optimizer_step"] + 2 * context,
        "weight_sync": a["weights"] + a["weight_sync"] + e["weights"] + e["weight_sync"] + 2 * context,
        "teacher_pass": a["teacher_pass"] + 2 * context,
    }
    assert actor.parts["moved_states"] == a["weights"] + a["optimizer"]
    assert engine.parts["moved_states"] == e["weights"], "an evaluation keeps them on the host"


def test_an_engine_with_a_kv_cache_of_a_given_size_takes_no_share() -> None:
    """Fails if a phase counts an engine's share of the GPU although its KV cache has a given size."""
    config = _config(*COLOCATED, "rollout.kv_cache_mib=4096")
    actor, engine = refit(config)
    assert found_phases(config, 80 * GIB)["generate"] == engine.total_bytes + actor.parts["context"]
    assert engine.parts["kv_cache"] == 4 * GIB


def test_a_teachers_lm_head_moves_with_the_weights() -> None:
    """Fails if an LM head that is in host memory during generation is counted on the GPU."""
    config = _config(*COLOCATED, "teacher.signal=hidden", "rollout.gpu_memory_utilization=0.95")
    actor, engine = footprint(config, QWEN25_15B, teacher_hidden=8192)
    found = shared_phases(actor, engine, 80 * GIB, config)
    head = actor.parts["teacher_head"]
    assert head > 4 * GIB and found["generate"] == round(0.95 * 80 * GIB) + actor.parts["context"]
    assert actor.parts["moved_states"] == actor.parts["weights"] + actor.parts["optimizer"] + head
    assert found["weight_sync"] > head + actor.parts["weights"] + engine.parts["weights"]
    assert actor.state_bytes == actor.parts["weights"] + actor.parts["gradients"] + actor.parts["optimizer"]


def test_resident_states_count_in_every_phase() -> None:
    """Fails if the states of a rank that does not offload them are left out of a local teacher's pass."""
    stays = refit(_config(*LOCAL, "teacher.fsdp_cpu_offload=true"))[0]
    moves = refit(_config(*LOCAL, "actor.offload_train=true"))[0]
    assert stays.phases()["teacher_pass"] - moves.phases()["teacher_pass"] == stays.state_bytes
    assert stays.phases()["weight_sync"] - moves.phases()["weight_sync"] == (
        stays.parts["gradients"] + stays.parts["optimizer"]
    )
    assert stays.phases()["training_step"] == moves.phases()["training_step"]


@pytest.mark.parametrize(
    ("gpu_bytes", "overrides", "phase", "key"),
    [
        (80 * GIB, ("rollout.gpu_memory_utilization=0.99",), "generate", "rollout.gpu_memory_utilization"),
        (24 * GIB, ("rollout.gpu_memory_utilization=0.5",), "training_step", "actor.max_tokens_per_micro_batch"),
    ],
)
def test_a_phase_that_does_not_fit_is_named_and_remedied(
    gpu_bytes: int, overrides: tuple[str, ...], phase: str, key: str
) -> None:
    """Fails if a phase that does not fit is not reported with its size, or no combination changes its key."""
    config = _config(*COLOCATED, *overrides)
    before = found_phases(config, gpu_bytes)
    (problem,) = [line for line in check(refit(config), gpu_bytes, config) if f"({phase})" in line]
    assert f"{before[phase] / GIB:.2f} GiB" in problem and f"{gpu_bytes / GIB:.2f} GiB" in problem
    found = find_combination(config, refit, gpu_bytes)
    assert found.fits and key in [override.partition("=")[0] for override in found.overrides]
    after = found_phases(_config(*COLOCATED, *overrides, *found.overrides), gpu_bytes)
    assert max(after.values()) == found.steps[-1].peak_bytes <= 0.9 * gpu_bytes


def test_a_shared_gpu_with_room_has_no_problem() -> None:
    """Fails if the sum of actor and engine is compared with the GPU, although they alternate."""
    config = _config(*COLOCATED, "actor.max_tokens_per_micro_batch=4096", "actor.recompute=full")
    whole = with_engine_cache(refit(config), 80 * GIB, config)
    assert sum(part.total_bytes for part in whole) > 80 * GIB
    assert check(whole, 80 * GIB, config) == []
    assert check(whole, 80 * GIB, _config()) == [], "separate pools have a GPU each"


def test_the_phases_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the phases of a shared GPU are not printed, or are printed for separate pools."""
    model = tmp_path / "student"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN25_15B))
    args = ["--config", "configs/gsm8k_qwen2.5_1.5b.yaml", "--gpu-gib", "80", f"model.path={model}"]
    args.append("actor.max_tokens_per_micro_batch=16384")
    assert memory.main([*args, *COLOCATED, "actor.recompute=full"]) == 0
    out = capsys.readouterr().out
    config = _config(*COLOCATED, "actor.recompute=full")
    found = with_engine_cache(refit(config), 80 * GIB, config)
    assert shared_phases_table(found, 80 * GIB, config) in out and "generate 69.00" in out
    assert memory.main([*args, "--json", *COLOCATED]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["turns"]["0"]["generate"] == 69 * GIB
    memory.main(args)
    assert "by phase" not in capsys.readouterr().out
