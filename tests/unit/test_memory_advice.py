"""Check the advice for memory shortages: the table of remedies, and the rows that the reports and the docs print."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_sections import all_keys
from gkd.memory import remedies
from gkd.memory.remedies import (
    ACTOR_REMEDIES,
    ENGINE_REMEDIES,
    FRAGMENTATION_REMEDIES,
    MAX_UTILIZATION,
    MIN_BUCKET_MIB,
    Shortage,
    advice,
    as_yaml,
    engine_advice,
)
from gkd.spans import Phase

DOCS = Path(__file__).parents[2] / "docs" / "memory.md"
BASE = ["data.train_files=[a]", "model.path=m", "trainer.run_dir=r"]
LOCAL = ["teacher.backend=local", "teacher.path=t"]
REFERENCE = ["distill.reference_kl_weight=0.1"]


def config(*overrides: str) -> Config:
    return load_config(None, [*BASE, *overrides])


def advised(
    found: Config, *, phase: Phase = Phase.TRAIN, on_cuda: bool = True, fragmented: bool = False, conf: str = ""
) -> str:
    environ = {"PYTORCH_ALLOC_CONF": conf} if conf else {}
    return "\n".join(advice(found, Shortage(phase, on_cuda, fragmented), environ))


def check_line(line: str, run: Config) -> None:
    """Check that the line begins with keys of the settings and their present values, and that next values follow."""
    now, _, rest = line.partition(": try ")
    pairs = [pair.split("=") for pair in now.split(", ")]
    assert all(str(run.value(key)) == value for key, value in pairs), line
    assert len(rest.partition(". ")[0].split(", ")) == len(pairs), line


def table() -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the table in docs/memory.md, without the next value in words."""
    for row in dict.fromkeys((*ACTOR_REMEDIES, *ENGINE_REMEDIES, *FRAGMENTATION_REMEDIES)):
        keys = ", ".join(f"`{key}`" for key in row.keys)
        on_device = {"": "", "cuda": " (GPU)", "cpu": " (CPU)"}[row.device]
        against = "fragmentation: " if row in FRAGMENTATION_REMEDIES and row not in ACTOR_REMEDIES else ""
        phases = ", ".join(map(str, row.phases)) or "all phases"
        phases += f" except {', '.join(map(str, row.not_in))}" if row.not_in else ""
        yield keys, f"{against}{phases}{on_device}", row.effect


def test_docs_have_the_table() -> None:
    """Fails if docs/memory.md lists other remedies than the reports print."""
    text = DOCS.read_text()
    lines = text.partition("| keys | next value | helps in | effect |\n|---|---|---|---|\n")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in lines.splitlines()]
    assert [(keys, phases, effect) for keys, _, phases, effect in cells] == list(table())
    assert f"half, at least {MIN_BUCKET_MIB} |" in text and f"0.05 more, at most {MAX_UTILIZATION} |" in text


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.strategy=fsdp2"],
        ["actor.fused_lm_head=false", "actor.packing=false", *LOCAL, "teacher.fsdp_cpu_offload=false"],
        ["trainer.n_gpus_per_node=2", "actor.tp=2", *REFERENCE, "reference.fsdp_cpu_offload=false"],
    ],
)
def test_every_row_changes_the_keys_that_it_names_and_nothing_else(overrides: list[str]) -> None:
    """Fails if a row names a key that does not exist or keeps its value, or its next value is refused."""
    run, applied = config(*overrides), 0
    for row in (*ACTOR_REMEDIES, *ENGINE_REMEDIES, *FRAGMENTATION_REMEDIES):
        assert set(row.keys) <= set(all_keys())
        changes = row.next(run)
        if not changes:
            continue
        applied += 1
        assert set(row.keys) <= set(changes) and set(changes) <= set(all_keys())
        assert all(run.value(key) != value for key, value in changes.items()), row
        if "n_gpus_per_node" not in str(row.keys) and "tp" not in str(row.keys):  # those depend on the model and pools
            check_config(config(*overrides, *(f"{key}={as_yaml(value)}" for key, value in changes.items())))
    assert applied > 10


def test_the_advice_fits_the_run() -> None:
    """Fails if the advice is what the run does already or what cannot help, or the helpful row is missing."""
    small = ["actor.micro_batch_size=1", "actor.recompute=full"]
    assert "actor.micro_batch_size=8: try 4." in advised(config())
    assert "micro_batch_size" not in advised(config("actor.max_tokens_per_micro_batch=4096"))
    assert "micro_batch=3000: try 2048." in advised(config("actor.max_tokens_per_micro_batch=3000")), "a sequence"
    assert "max_tokens" not in advised(config("actor.max_tokens_per_micro_batch=2048"))
    assert not any(word in advised(config(*small)) for word in ("micro_batch", "recompute"))
    assert "actor.fused_lm_head=False: try true." in advised(config("actor.fused_lm_head=false"))
    assert "recompute" not in advised(config(), phase=Phase.EVALUATE)
    sharded = ["actor.strategy=fsdp2"]
    assert "actor.fsdp_cpu_offload=False: try true." in advised(config(*sharded))
    assert "fsdp_cpu_offload" not in advised(config(*sharded, "actor.fsdp_cpu_offload=true"))
    assert "actor.tp=1, trainer.n_gpus_per_node=1: " in advised(config())
    assert "fsdp_cpu_offload" not in advised(config(*sharded), on_cuda=False)
    assert "gpu_memory_utilization" not in advised(config("trainer.colocate=true")), "the engine sleeps meanwhile"
    assert "weight_sync.bucket_mib=256: try 128." in advised(config(), phase=Phase.SEND)
    assert "data.max_response_length" not in advised(config(), phase=Phase.SEND)
    assert "sequence_parallel" not in advised(config())
    assert "actor.sequence_parallel=False: try true." in advised(config("trainer.n_gpus_per_node=2", "actor.tp=2"))


def test_the_advice_against_fragmentation() -> None:
    """Fails if a fragmented rank is not told of the allocator first, or one that is not fragmented is."""
    assert "expandable_segments" not in advised(config()) and "actor.max_tokens" not in advised(config())
    fragmented = advised(config("actor.strategy=fsdp2"), fragmented=True)
    assert fragmented.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert "actor.max_tokens_per_micro_batch=0: try 16384." in fragmented, "8 sequences of 2048 tokens"
    assert fragmented.count("actor.fsdp_cpu_offload") == 1
    assert "actor.packing=False: try true." in advised(config("actor.packing=false"), fragmented=True)
    assert "expandable" not in advised(config(), fragmented=True, conf="expandable_segments:True")
    for key in ("expandable_segments:True", "actor.packing", "actor.max_tokens_per_micro_batch"):
        assert key in remedies.fragmentation_hint()


def test_the_advice_for_an_engine() -> None:
    """Fails if an engine's advice has keys that it does not use, or that do not help in the phase."""

    def told(phase: Phase, *overrides: str, on_cuda: bool = True) -> str:
        device = "trainer.device=cuda" if on_cuda else "trainer.device=cpu"
        return "\n".join(engine_advice(config(device, *overrides), Shortage(phase, on_cuda, False)))

    for phase in (Phase.BUILD_ENGINE, Phase.GENERATE, Phase.RECEIVE, Phase.OFFLOAD, Phase.ONLOAD):
        for on_cuda in (True, False):
            *lines, _ = told(phase, on_cuda=on_cuda).splitlines()
            assert lines
            for line in lines:
                check_line(line, config())
        assert ("bucket_mib" in told(phase)) == (phase is Phase.RECEIVE)
        assert ("gpu_memory_utilization=0.85: try 0.75." in told(phase)) == (phase is not Phase.OFFLOAD)
        halved = "max_num_seqs=64: try 32." in told(phase, "rollout.max_num_seqs=64")
        assert halved == (phase is not Phase.OFFLOAD)
    assert "rollout.kv_cache_mib=0: try 128." in told(Phase.GENERATE, on_cuda=False)
    assert "kv_cache_mib" not in told(Phase.GENERATE)
    given = told(Phase.GENERATE, "rollout.kv_cache_mib=4096")
    assert "rollout.kv_cache_mib=4096: try 2048." in given and "gpu_memory_utilization" not in given
