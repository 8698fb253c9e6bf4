"""Check the table of remedies: keys and next values, what the reports advise, and the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_sections import all_keys
from gkd.memory.remedies import TABLE, advice, overrides
from gkd.spans import Phase

DOCS = Path(__file__).parents[2] / "docs" / "memory.md"
BASE = ["data.train_files=[a]", "model.path=m", "trainer.run_dir=r"]
LOCAL = ["teacher.backend=local", "teacher.path=t", "teacher.fsdp_cpu_offload=false"]
REFERENCE = ["distill.reference_kl_weight=0.1", "reference.fsdp_cpu_offload=false"]
RUNS = [
    [],
    ["actor.strategy=fsdp2", "actor.max_tokens_per_micro_batch=4096"],
    ["actor.fused_lm_head=false", *LOCAL],
    ["trainer.n_gpus_per_node=2", "actor.tp=2", *REFERENCE],
    ["trainer.n_gpus_per_node=2", "rollout.kv_cache_mib=1024", "rollout.max_num_seqs=64", "memory.strategy=resident"],
]


def config(*given: str) -> Config:
    return load_config(None, [*BASE, *given])


def advised(found: Config, phase: Phase = Phase.TRAIN, role: str = "actor", *, on_cuda: bool = True) -> str:
    return "\n".join(advice(found, role, phase, on_cuda=on_cuda))


@pytest.mark.parametrize("given", RUNS, ids=lambda given: given[0] if given else "defaults")
def test_every_row_changes_keys_to_values_that_are_accepted(given: list[str]) -> None:
    """Fails if a row names a key that does not exist, keeps its value, or its next value is refused."""
    run, n_applied = config(*given), 0
    for row in TABLE:
        changes = row.next(run)
        assert set(changes) <= set(all_keys())
        assert all(run.value(key) != value for key, value in changes.items()), row
        if changes and not any("n_gpus_per_node" in key or ".tp" in key for key in changes):  # the model decides
            check_config(config(*given, *overrides(changes)))
            n_applied += 1
    assert n_applied > 6


def test_the_docs_have_the_rows() -> None:
    """Fails if docs/memory.md lists other keys, in another order, than those that are applied."""
    rows = [{key for given in RUNS for key in row.next(config(*given))} for row in TABLE]
    text = DOCS.read_text().partition("| change | helps in |\n|---|---|\n")[2].partition("\n\n")[0]
    lines = text.splitlines()
    assert len(lines) == len(rows)
    for keys, line in zip(rows, lines, strict=True):
        named = set(re.findall(r"`([a-z_]+\.[a-z_.0-9]+)", line))
        assert named <= keys and named, line


def test_the_advice_fits_the_run() -> None:
    """Fails if the advice is what the run does already or what cannot help, or the helpful row is missing."""
    small = ["actor.micro_batch_size=1", "actor.recompute=full"]
    assert "actor.micro_batch_size=8: try actor.micro_batch_size=4." in advised(config())
    assert "micro_batch_size" not in advised(config("actor.max_tokens_per_micro_batch=4096"))
    assert "try actor.max_tokens_per_micro_batch=2048." in advised(config("actor.max_tokens_per_micro_batch=3000"))
    assert "max_tokens" not in advised(config("actor.max_tokens_per_micro_batch=2048")), "a sequence"
    assert not any(word in advised(config(*small)) for word in ("micro_batch", "recompute"))
    assert "try actor.fused_lm_head=true." in advised(config("actor.fused_lm_head=false"))
    assert "recompute" not in advised(config(), Phase.EVALUATE)
    assert "actor.cp=2 trainer.n_gpus_per_node=2" in advised(config()) and "cp=2. " in advised(
        config("trainer.n_gpus_per_node=2")
    )
    assert "actor.cp" not in advised(config("teacher.tokenizer=t")), "whole sequences are compared"
    sharded = ["actor.strategy=fsdp2"]
    assert "try actor.fsdp_cpu_offload=true." in advised(config(*sharded))
    assert "fsdp_cpu_offload" not in advised(config(*sharded, "actor.fsdp_cpu_offload=true"))
    assert "fsdp_cpu_offload" not in advised(config(*sharded), on_cuda=False), "the host is short"
    assert "micro_batch" in advised(config(), on_cuda=False)
    assert "try actor.offload_train=true." in advised(config(), Phase.SCORE)
    assert "gpu_memory_utilization" not in advised(config("trainer.colocate=true")), "the engine sleeps meanwhile"
    assert "bucket_mib=256: try weight_sync.bucket_mib=128." in advised(config(), Phase.SEND)
    assert "sequence_parallel" not in advised(config())
    assert "actor.sequence_parallel=true." in advised(config("trainer.n_gpus_per_node=2", "actor.tp=2"))


def test_the_advice_for_an_engine() -> None:
    """Fails if an engine's advice has keys that it does not use, or that do not help in the phase."""
    for phase in (Phase.BUILD_ENGINE, Phase.GENERATE, Phase.RECEIVE, Phase.ONLOAD):
        text = advised(config("trainer.device=cuda"), phase, "rollout")
        assert "gpu_memory_utilization=0.85: try rollout.gpu_memory_utilization=0.75." in text
        assert ("bucket_mib" in text) == (phase is Phase.RECEIVE) and "actor.recompute" not in text
        assert "rollout.max_num_seqs=32." in advised(config("rollout.max_num_seqs=64"), phase, "rollout")
    on_cpu = advised(config("trainer.device=cpu"), Phase.GENERATE, "rollout", on_cuda=False)
    assert "rollout.kv_cache_mib=0: try rollout.kv_cache_mib=128." in on_cpu and "utilization" not in on_cpu
    given = config("rollout.kv_cache_mib=4096")
    assert "rollout.kv_cache_mib=2048." in advised(given, Phase.GENERATE, "rollout")
    assert "rollout.kv_cache_mib=8192." in advised(given, Phase.CACHE, "rollout")
