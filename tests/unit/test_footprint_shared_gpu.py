"""A GPU that an actor rank and an engine share: the memory of each phase, and fixes that are verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkd.config.schema import Config
from gkd.memory.footprint import RankFootprint, check, footprint
from gkd.memory.footprint.combination import find_combination
from gkd.memory.footprint.rank import shared_phases
from gkd.memory.footprint.report import shared_phases_table
from gkd.memory.footprint.rollout import with_engine_cache
from gkd.tools import memory
from tests.unit.test_footprint import GIB, QWEN25_15B, _config

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
