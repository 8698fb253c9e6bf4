"""Test what fits on a GPU: an engine's share, the phases of a shared GPU, hosts, and changes with which a run fits."""

from __future__ import annotations

from typing import Any

import pytest

from gkd.config.check import check_config
from gkd.config.schema import Config
from gkd.errors import ConfigError, ModelError
from gkd.memory.footprint.estimate import RunModels, engine_limit, max_sequences
from gkd.memory.footprint.fit import Case, check, gpu_phases, host_bytes, remedy_lines, table
from gkd.memory.remedies import overrides
from gkd.spans import Phase
from tests.unit.test_footprint import GIB, QWEN25_15B, TP2, actor_of, config_of, folder_of, ranks_of

COLOCATED = ("trainer.colocate=true", "trainer.n_gpus_per_node=1", "rollout.n_gpus_per_node=1")
LOCAL = ("teacher.backend=local", "teacher.path=t")
STAYS, MOVES = "teacher.fsdp_cpu_offload=true", "actor.offload_train=true"
SEQUENCE = 1536 * 28672  # bytes of the KV cache of a sequence of full length


def case_of(config: Config, gib: float | None, host_gib: int | None = None, model: Any = None) -> Case:
    local = folder_of(QWEN25_15B) if config.teacher.backend == "local" else None
    reference = folder_of(QWEN25_15B) if config.derived.reference_folder else None
    models = RunModels(folder_of(model or QWEN25_15B), local, reference)
    return Case(config, models, None if gib is None else round(gib * GIB), host_gib and host_gib * GIB)


def test_an_engines_share_of_a_gpu() -> None:
    """Fails if an engine's total is not its share, or a share leaves no room for the first weight sync."""
    engine = ranks_of(config_of(), gpu_bytes=80 * GIB)[-1]
    assert engine.total_bytes == round(0.85 * 80 * GIB) and engine.sequence_bytes == SEQUENCE
    assert ranks_of(config_of())[-1].parts["kv_cache"] == 167 * SEQUENCE, "of all sequences"
    for tp in (2, 4):  # a key or value head is never cut; with more ranks than heads they are repeated
        assert ranks_of(config_of(f"rollout.tp={tp}", "rollout.n_gpus_per_node=4"))[-1].sequence_bytes == SEQUENCE // 2
    config = config_of("rollout.gpu_memory_utilization=0.99", "weight_sync.bucket_mib=2048", "actor.recompute=full")
    (problem,) = check(ranks_of(config, gpu_bytes=80 * GIB), 80 * GIB, config)
    assert "rollout rank 0 (receiving weights) needs 2.88 GiB" in problem
    longer = config_of("teacher.backend=rollout", "data.teacher_prompt_key=t", "data.max_teacher_prompt_length=4096")
    assert longer.derived.max_engine_length > longer.derived.max_sequence_length
    found = ranks_of(longer, gpu_bytes=3 * GIB)
    assert any(
        f"a sequence of {longer.derived.max_engine_length} tokens" in line for line in check(found, 3 * GIB, longer)
    )


def test_a_kv_cache_of_a_given_size() -> None:
    """Fails if an engine whose KV cache has a given size is predicted with its share of the GPU."""
    config = config_of("rollout.kv_cache_mib=3072", "rollout.gpu_memory_utilization=0.99", "actor.recompute=full")
    found = ranks_of(config, gpu_bytes=80 * GIB)
    assert found[-1].parts["kv_cache"] == 3 * GIB and check(found, 80 * GIB, config) == []
    assert any("rollout rank 0 (generating)" in line for line in check(found, 4 * GIB, config))
    for mib, better in ((16, 64), (131072, 65536)):
        changes, result = case_of(config_of(f"rollout.kv_cache_mib={mib}"), 80).fitting()
        assert changes == {"rollout.kv_cache_mib": better} and not result.problems()


AUTO = ("rollout.max_num_seqs=0", "rollout.n_gpus_per_node=1", "trainer.global_batch_size=4096")


@pytest.mark.parametrize(
    ("overrides", "gib", "expected"),
    [
        (AUTO, 80, 1024),  # the most
        (AUTO, 24, None),
        (AUTO, 6, 128),  # the least
        ((*AUTO, "trainer.global_batch_size=700"), 80, 700),  # all that the run has
        ((*AUTO, "rollout.kv_cache_mib=10500"), 80, 250),  # 42 MiB each
    ],
)
def test_the_number_of_sequences_follows_from_the_kv_cache(
    overrides: tuple[str, ...], gib: int | None, expected: int | None
) -> None:
    """Fails if a GPU decodes fewer sequences than it has room for, or more, which vLLM preempts."""
    config, gpu_bytes = config_of(*overrides), gib and gib * GIB
    found = engine_limit(config, ranks_of(config, gpu_bytes=gpu_bytes)[-1], gpu_bytes)
    assert case_of(config, gib).settled().config.rollout.max_num_seqs == found
    if expected is not None:
        assert found == expected
        return
    assert 128 < found < 1024
    for n, is_enough in ((found, True), (found + 1, False)):
        engine = ranks_of(config.with_values({"rollout.max_num_seqs": n}), gpu_bytes=gpu_bytes)[-1]
        assert (engine.parts["kv_cache"] >= n * SEQUENCE) == is_enough, n


@pytest.mark.parametrize(
    ("overrides", "n"),
    [
        # 128 prompts a step on 3 engines, and 500 in an evaluation.
        (("data.val_files=[]",), 43),
        (("eval.max_prompts=0",), 256),  # their number is unknown
        (("trainer.scheduler=one_step_off",), 210),
        (("trainer.scheduler=stream", "trainer.max_staleness=3", "data.val_files=[]"), 171),
    ],
)
def test_sequences_of_an_engine(overrides: tuple[str, ...], n: int) -> None:
    """Fails if a prefetching scheduler, or an evaluation, is counted with the cache of one batch."""
    assert max_sequences(config_of(*overrides)) == n


def test_each_phase_counts_what_is_on_the_gpu() -> None:
    """Fails if offloaded memory is counted, or resident states or the second copy of a weight sync are not."""
    config = config_of(*COLOCATED, *LOCAL, "rollout.gpu_memory_utilization=0.5")
    actor, engine = case_of(config, 80).footprints()
    a, e = actor.parts, engine.parts
    states = a["weights"] + a["gradients"] + a["optimizer"]
    assert gpu_phases(actor, engine, config) == {
        Phase.GENERATE: 40 * GIB + a["context"],
        Phase.TRAIN: states + a["activations"] + a["logits"] + a["transient"] + 2 * GIB,
        Phase.SEND: a["weights"] + a["weight_sync"] + e["weights"] + e["weight_sync"] + 2 * GIB,
        Phase.SCORE: a["teacher_pass"] + 2 * GIB,
    }
    assert a["moved_states"] == a["weights"] + a["optimizer"]
    assert e["moved_states"] == e["weights"], "an evaluation keeps them on the host"
    phases = {given: actor_of(*LOCAL, given, local_teacher=folder_of(QWEN25_15B)).phases() for given in (STAYS, MOVES)}
    assert phases[STAYS][Phase.SCORE] - phases[MOVES][Phase.SCORE] == states
    assert phases[STAYS][Phase.SEND] - phases[MOVES][Phase.SEND] == states - a["weights"]
    given = config_of(*COLOCATED, "rollout.kv_cache_mib=4096")
    actor, engine = case_of(given, 80).footprints()
    assert gpu_phases(actor, engine, given)[Phase.GENERATE] == engine.total_bytes + GIB < 11 * GIB


def test_a_teacher_server_on_the_same_gpu_counts_in_every_phase() -> None:
    """Fails if its share is left out of a phase, or counted twice on a shared GPU."""
    for given in ((), COLOCATED):
        alone, beside = config_of(*given), config_of(*given, "cluster.teacher_gpu_share=0.1")
        before, after = (ranks_of(config, gpu_bytes=80 * GIB) for config in (alone, beside))
        for phase, size in before[0].phases().items():
            assert after[0].phases()[phase] == size + 8 * GIB
        assert after[-1].total_bytes - before[-1].total_bytes == (0 if alone.trainer.colocate else 8 * GIB)
        assert after[-1].parts["kv_cache"] == before[-1].parts["kv_cache"], "vLLM's share is one of the whole GPU"
    full = config_of("rollout.gpu_memory_utilization=0.9", "cluster.teacher_gpu_share=0.1")
    found = ranks_of(full, gpu_bytes=90 * GIB)
    assert any(line.startswith("rollout rank 0 (receiving weights) needs 9.") for line in check(found, 90 * GIB, full))


def test_the_memory_of_a_host() -> None:
    """Fails if states in host memory, a sleeping engine's weights or kept weights are left out, or all nodes are added
    up, or the ranks of a CPU run are not counted.
    """
    student = 2 * 1_543_714_304  # bytes in bfloat16
    config = config_of(*TP2, "rollout.n_gpus_per_node=2")
    assert host_bytes(ranks_of(config), config, 1.0) == 2 * ranks_of(config)[0].parts["saved_copy"] + student + GIB
    offloaded = config_of(*COLOCATED, "actor.strategy=fsdp2", "actor.fsdp_cpu_offload=true", "rollout.max_restarts=0")
    found = ranks_of(offloaded)
    parts = sum(found[0].parts[name] for name in ("offloaded", "saved_copy", "moved_states"))
    assert host_bytes(found, offloaded, 0.0) == parts + student
    nodes = config_of("cluster.ray_address=h:1", "trainer.nnodes=2", "trainer.n_gpus_per_node=2", *TP2[1:])
    assert host_bytes(ranks_of(nodes), nodes, 4.0) == 2 * ranks_of(nodes)[0].parts["saved_copy"] + 2 * GIB + student
    on_cpu = config_of("trainer.device=cpu", "rollout.n_gpus_per_node=1", "trainer.save_every=0")
    found = ranks_of(on_cpu)
    assert host_bytes(found, on_cpu, 0.0) == found[0].total_bytes + found[1].total_bytes + student


@pytest.mark.parametrize(
    ("gib", "given"),
    [
        (24, COLOCATED),
        (8, ("actor.max_tokens_per_micro_batch=0",)),
        (12, ("trainer.n_gpus_per_node=2", "actor.tp=2", "actor.sequence_parallel=true", "actor.recompute=selective")),
        (80, ("rollout.gpu_memory_utilization=0.99", "weight_sync.bucket_mib=2048")),
    ],
)
def test_the_changes_fit_and_none_is_needless(gib: int, given: tuple[str, ...]) -> None:
    """Fails if pasted overrides are refused, do not fit, or include a needless change."""
    changes, result = case_of(config_of(*given), gib).fitting()
    config = config_of(*given, *overrides(changes))
    check_config(config)
    assert changes and result.config == config and case_of(config, gib).problems() == []
    for key in changes:
        fewer = {other: value for other, value in changes.items() if other != key}
        try:
            left = config_of(*given, *overrides(fewer))
            check_config(left)
        except ConfigError:
            continue  # a key of the same row, like actor.tp=1 of actor.strategy=fsdp2
        assert case_of(left, gib).problems() or key != "actor.recompute", key


def test_a_long_sequence_gets_context_parallelism() -> None:
    """Fails if a sequence whose activations do not fit is not split over the GPUs that the run has, or over more."""
    long = ("actor.max_tokens_per_micro_batch=0", "actor.micro_batch_size=1", "data.max_response_length=120000")
    layout = ("actor.strategy=fsdp2", "actor.recompute=full", "model.dtype=bfloat16", "rollout.n_gpus_per_node=2")
    for n_gpus, gib, key in ((2, 40, "actor.cp"), (1, 28, "trainer.n_gpus_per_node")):
        config = config_of(*long, *layout, f"trainer.n_gpus_per_node={n_gpus}")
        changes, result = case_of(config, gib).fitting()
        assert changes["actor.cp"] == 2 and key in changes and not result.problems()


def test_what_does_not_fit_is_said() -> None:
    """Fails if changes that do not suffice are printed as if they did."""
    lines = remedy_lines(case_of(config_of(), 3), "run")
    assert lines[0].startswith("it does not fit") and len(lines) > 1 and "fsdp_cpu_offload=true" in lines[0]
    assert remedy_lines(case_of(config_of(), 80), "run") == ["it fits with: run"]


def test_more_gpus_are_the_last_resort() -> None:
    """Fails if more GPUs are demanded although less would do, or are not found where nothing else helps, or states are
    moved to a host without room.
    """
    deep = QWEN25_15B | {"num_hidden_layers": 280}
    changes, result = case_of(config_of(), 80, model=deep).fitting()
    assert result.problems() == [] and "trainer.n_gpus_per_node" not in changes
    changes, _ = case_of(config_of(), 80, host_gib=64, model=deep).fitting()
    assert "trainer.n_gpus_per_node" in changes and "actor.fsdp_cpu_offload" not in changes


def test_changes_of_a_model_that_cannot_be_split_are_not_proposed() -> None:
    """Fails if a printed split is refused at the start of the run: 3 key heads over 2 ranks."""
    odd = QWEN25_15B | {"num_key_value_heads": 3}
    changes, _ = case_of(config_of("rollout.n_gpus_per_node=2"), 4, model=odd).fitting()
    assert not {"actor.tp", "rollout.tp"} & changes.keys()
    with pytest.raises((ConfigError, ModelError)):
        case_of(config_of("rollout.n_gpus_per_node=2", "rollout.tp=2"), 4, model=odd).footprints()


@pytest.mark.parametrize(
    "frozen",
    [
        (*LOCAL, "teacher.fsdp_cpu_offload=false"),
        ("distill.reference_kl_weight=0.1", "reference.fsdp_cpu_offload=false"),
    ],
)
def test_the_strategy_is_resident_where_all_models_fit(frozen: tuple[str, ...]) -> None:
    """Fails if the student's states move on a card where all models fit, or stay where they do not fit."""

    def chosen(gib: float | None, *given: str) -> str:
        return case_of(config_of("actor.recompute=full", *frozen, *given), gib).settled().config.memory.strategy

    resident = config_of("actor.recompute=full", *frozen, "memory.strategy=resident")
    peak = max(need.n_bytes for need in case_of(resident, 80).needs() if need.role == "actor") / GIB
    assert chosen(peak / 0.89) == "resident" and chosen(peak / 0.91) == "offload" == chosen(None)
    assert chosen(80, "trainer.device=cpu") == "offload" == chosen(80, f"{frozen[-1].partition('=')[0]}=true")
    assert [chosen(24, f"memory.strategy={name}") for name in ("resident", "offload")] == ["resident", "offload"]


def test_the_table_names_the_fullest_phase() -> None:
    """Fails if the phase of a shared GPU that is the fullest is not shown, or states on the host look like a GPU's."""
    lines = table(case_of(config_of(*COLOCATED, "actor.recompute=full"), 80)).splitlines()
    assert "peak 69.00 GiB (generating), 86% of the GPU" in lines[0] and "host: moved_states 20.13" in lines[0]
