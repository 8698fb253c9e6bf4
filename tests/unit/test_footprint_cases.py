"""Compare predictions with measured blocks of torch's CUDA allocator; check the shipped examples and shared cards."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.memory.footprint import check
from gkd.memory.footprint.combination import find_combination
from gkd.memory.footprint.estimate import footprint
from gkd.memory.footprint.limits import smallest_margin
from gkd.memory.footprint.rank import other_processes_bytes, with_other_processes
from gkd.memory.footprint.teacher import teacher_footprint
from gkd.preflight import memory as preflight_memory
from tests.bench.footprint_allocator import CASES
from tests.bench.footprint_peak import LOSS, SAVED, STATES, WORKSPACES, PeakCase, predict
from tests.refusals import refuses
from tests.unit.test_footprint import GIB, QWEN25_15B, _config, list_gpus

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "footprint_cuda_allocator.json"


def _measured(part: str, case: PeakCase) -> dict[str, int]:
    (table,) = json.loads(MEASURED.read_text())["parts"][part]["tables"]
    (row,) = (row for row in table["rows"] if row[0] == case.name)
    return dict(zip(table["columns"], row, strict=True))


@pytest.mark.parametrize("case", CASES["megatron"], ids=lambda case: case.name)
def test_the_peak_and_the_items_of_a_megatron_rank(case: PeakCase, tmp_path: Path) -> None:
    """Fails if the prediction on CUDA forgets a tensor of some percent of the peak, counts one that is not there, or
    hides a wrong term behind another one, for example saved activations behind the loss.
    """
    parts, peak = predict(case, tmp_path)
    found = _measured("megatron", case)
    assert 0.98 < peak / found["peak"] < 1.06
    if case.name.startswith("small"):
        return  # the loss is not the peak
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert states / found[STATES] == pytest.approx(1.0, abs=0.01)
    assert 0.97 < parts["activations"] / found[SAVED] < 1.03
    # The prediction has 32 MiB for kernels that are not Triton's.
    assert 0.97 * found[LOSS] < parts["logits"] + parts["transient"] < 1.05 * found[LOSS] + (32 << 20)


@pytest.mark.parametrize("case", CASES["fsdp2"], ids=lambda case: case.name)
def test_the_peak_of_an_fsdp2_rank(case: PeakCase, tmp_path: Path) -> None:
    """Fails if a gathered layer, a gradient or activations are forgotten on CUDA. Of a step of one micro-batch, whose
    gradients do not exist during its loss, more is predicted by up to their size.
    """
    parts, peak = predict(case, tmp_path)
    measured = _measured("fsdp2", case)
    found = measured["peak"] - measured[WORKSPACES]  # they are part of what is counted as context
    spare = parts["gradients"] if case.n_batches == 1 else 0
    assert 0.98 * found < peak < 1.06 * found + spare


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
        ((80, 80 - 0.5), (), 0),  # the driver has some
        ((80 - 12, 80), (), 12),
        ((80, 80 - 12), (), 12),
        ((80 - 12, 80), ("cluster.gpus=[1]", "trainer.colocate=true", "rollout.n_gpus_per_node=1"), 0),
        ((80, 80 - 12), ("trainer.colocate=true", "rollout.n_gpus_per_node=1"), 0),  # Ray assigns the lowest one
    ],
)
def test_preflight_counts_what_is_on_the_card(
    tmp_path: Path, host_has: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, gkd_log: pytest.LogCaptureFixture,
    free: tuple[float, ...], overrides: tuple[str, ...], in_use: int,
) -> None:  # fmt: skip
    """Fails if a teacher server or a stranger on a card of the pools is not counted, or one on another card is."""
    list_gpus(tmp_path, monkeypatch, [(80, gib) for gib in free])
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
    with refuses(key):
        check_config(load_config(None, [*settings, *overrides]))
    check_config(load_config(None, [*settings, "rollout.gpu_memory_utilization=0.95", "rollout.kv_cache_mib=64"]))
