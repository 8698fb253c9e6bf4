"""Compare compiled layers of the FSDP2 student with the same layers uncompiled.

CI traces them with dynamo and AOTAutograd, which make the graphs and their derivatives. The slow tests also let
Inductor write C++, or kernels for a card, which takes up to a minute a layer. On stand-in cards:

    TORCHDYNAMO_DISABLE=0 bash tests/dry_card/run.sh --cards 2 -m slow tests/dist/test_{compiled,fused}_layers.py
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from gkd.actor.fsdp import compiled
from gkd.config.schema_actor import LoraConfig
from gkd.data.batching import make_micro_batches
from tests.bench.student_case import random_sequences
from tests.device import environment, host
from tests.dist.helpers import caught, run_ranks
from tests.dist.megatron_reference import make_micro_batches as reference_batches
from tests.dist.student_cases import as_numpy, build_student, packed, share
from tests.model_families import N_BYTES, VOCAB, save_family

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(os.environ.get("TORCHDYNAMO_DISABLE") == "1", reason="nothing is compiled"),
]
cpu_only = pytest.mark.cpu_only("code of a CPU, or of no device, is compiled")

LORA = LoraConfig(rank=4, alpha=8.0, targets=["q_proj", "down_proj"])
RECOMPUTE = {"recompute": "full"}
# One for each mechanism, with settings of the student. CI traces the first one.
IN_CI: dict[str, dict[str, Any]] = {"gemma2": RECOMPUTE}  # windows and soft caps
MECHANISMS: dict[str, dict[str, Any]] = {
    "qwen3": {},  # shared heads
    "qwen3_moe": {},
    "qwen3_5_text": {},  # delta nets
    "gpt_oss": {},  # sinks
    "granitemoehybrid": {},  # Mamba
    "deepseek_v3": {},  # latent attention
    "lfm2": {},  # convolutions
    "granite": {},  # scaled logits
    "phi3": {},  # fused projections
    "gemma3_text": {},  # windows in some layers
    "smollm3": RECOMPUTE,  # layers without positions
    "mixtral": {},
}


def _batches(packing: bool) -> list[Any]:
    """Return micro-batches with ids that all families have."""
    fitted = []
    for batch in reference_batches(0):
        wanted = replace(batch.targets, sampled_ids=batch.targets.sampled_ids % N_BYTES)
        ids = torch.arange(batch.targets.topk_ids.shape[1]).expand_as(batch.targets.topk_ids).clone()
        fitted.append(replace(batch, tokens=batch.tokens % N_BYTES, targets=replace(wanted, topk_ids=ids)))
    return [packed(batch) for batch in fitted] if packing else fitted


def _measure(rank: int, world_size: int, folder: Path, backend: str, settings: dict[str, Any]) -> dict[str, Any]:
    compiled._BACKEND = backend
    compiled._LENGTHS = ((11, 7), (7, 13, 5))  # interpreted kernels of a start's longer ones take minutes
    batches = share(_batches(settings.get("packing", True)), rank, world_size)
    found: dict[str, Any] = {}
    for mode in ("off", "on"):
        student = build_student("fsdp2", folder, rank, world_size, compiles=mode, **settings)
        if settings.get("lora"):
            for adapter in student._adapters.values():  # a product of zeros would have a gradient for B alone
                torch.nn.init.constant_(adapter.b.tensor.to_local(), 0.1)
        logprobs = [host(x) for x in student.compute_logprobs(batches)]
        student._zero_grads()
        student._run(batches, backward=True)
        grads = {name: p.grad.full_tensor() for name, p in student.model.named_parameters() if p.grad is not None}
        found[mode] = logprobs, as_numpy(grads), student.train_step(batches).grad_norm
    return found


def _compare(found: dict[str, Any]) -> None:
    logprobs, grads, norm = found["on"]
    plain_logprobs, plain_grads, plain_norm = found["off"]
    for ours, plain in zip(logprobs, plain_logprobs, strict=True):
        assert (abs(ours - plain) < 1e-5 * np.maximum(1, abs(plain))).all()
    names = [name.replace("_checkpoint_wrapped_module.", "") for name in grads]
    assert len(names) == len(plain_grads) > 0
    largest = max(abs(grad).max() for grad in plain_grads.values())
    for (name, grad), plain in zip(grads.items(), plain_grads.values(), strict=True):
        assert abs(grad - plain).max() <= 1e-5 * max(abs(plain).max(), 1e-2 * largest), name
    assert norm == pytest.approx(plain_norm, rel=1e-5)


@cpu_only
@pytest.mark.parametrize(("name", "settings"), IN_CI.items())
def test_layers_are_traced_to_what_they_compute(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """Fails if a layer of a mechanism cannot be one graph, or its graph or derivative is another function."""
    save_family(tmp_path, name, seed=1)
    (found,) = run_ranks(_measure, 1, tmp_path, "aot_eager", settings, timeout_s=120.0)
    _compare(found)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), (IN_CI | MECHANISMS).items())
@pytest.mark.parametrize("packing", [True, False])
def test_compiled_layers_compute_what_the_plain_ones_do(
    tmp_path: Path, name: str, settings: dict[str, Any], packing: bool
) -> None:
    """Fails if compiled code of a mechanism has other logprobs or gradients."""
    save_family(tmp_path, name, seed=1)
    (found,) = run_ranks(_measure, 1, tmp_path, "inductor", settings | {"packing": packing}, timeout_s=600.0)
    _compare(found)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"lora": LORA}, {"lora": LORA, **RECOMPUTE}])
def test_compiled_layers_on_two_ranks(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Fails if adapters, gathered parameters or a rank with less work change what compiled layers compute."""
    save_family(tmp_path, "qwen3", seed=1)
    for found in run_ranks(_measure, 2, tmp_path, "inductor", settings, timeout_s=600.0):
        _compare(found)


def _run_many(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    compiled._BACKEND = "aot_eager"
    student = build_student("fsdp2", folder, rank, world_size, compiles="on")
    n_graphs = counters["stats"]["unique_graphs"]
    rng = np.random.default_rng(0)
    lengths = [(2 + i % 3, 1 + i) for i in range(50)]
    rollouts, scores = random_sequences(lengths, rng, VOCAB, 8)
    at = 0
    while at < len(lengths):  # packs of 1 to 4 sequences, each of another length
        end = at + 1 + at % 4
        student.train_step(make_micro_batches(rollouts[at:end], scores[at:end], micro_batch_size=4, packed=True))
        at = end
    n_more = counters["stats"]["unique_graphs"] - n_graphs
    torch._dynamo.reset()
    student = build_student("fsdp2", folder, rank, world_size)
    compiled._VARIANTS = 1
    place: dict[str, Any] = {"packing": True, "dtype": torch.float32, "device": torch.device("cpu")}
    refusal = caught(lambda: compiled.compile_layers(student.model, must=True, **place))
    with environment({"TORCHDYNAMO_DISABLE": "1"}):
        disabled = caught(lambda: compiled.compile_layers(student.model, must=True, **place))
    warnings = list[str]()
    compiled.log.warning = lambda text, *args: warnings.append(text % args)
    compiled.compile_layers(student.model, must=False, **place)
    batches = make_micro_batches(rollouts[:3], scores[:3], micro_batch_size=4, packed=True)
    loss = student.train_step(batches).loss
    return {"more": n_more, "refusal": refusal, "disabled": disabled, "warnings": warnings, "loss": loss}


@cpu_only
def test_what_is_compiled_is_decided_at_the_start(tmp_path: Path) -> None:
    """Fails if new lengths compile again, or layers run uncompiled without a word, or a run ends that could go on."""
    save_family(tmp_path, "qwen3", seed=1)
    (found,) = run_ranks(_run_many, 1, tmp_path, timeout_s=120.0)
    assert found["more"] <= 2
    assert "actor.compile" in found["refusal"][1]
    assert "TORCHDYNAMO_DISABLE" in found["disabled"][1]
    assert len(found["warnings"]) == 1
    assert "recompile" in found["warnings"][0].lower()
    assert found["loss"] > 0


def _fail_on_one_rank(rank: int, world_size: int, folder: Path) -> tuple[list[str], float]:
    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError(f"no compiler for {type(graph).__name__}")

    compiled._LENGTHS = compiled._LENGTHS[:1]
    student = build_student("fsdp2", folder, rank, world_size)
    reasons = list[str]()
    compiled.log.warning = lambda text, *args: reasons.append(text % args)
    for backend in (fails, aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=fails)):
        torch._dynamo.reset()
        compiled._BACKEND = backend if rank == 1 else "aot_eager"
        device = torch.device("cpu")
        compiled.compile_layers(student.model, must=False, packing=True, dtype=torch.float32, device=device)
    return reasons, student.train_step(share(_batches(packing=True), rank, world_size)).loss


@cpu_only
def test_a_rank_that_cannot_compile_does_not_stop_the_others(tmp_path: Path) -> None:
    """Fails if ranks wait for one whose compiler fails, in a forward pass or its derivative, or compile without it."""
    save_family(tmp_path, "qwen3", seed=1)
    (reasons, loss), others = run_ranks(_fail_on_one_rank, 2, tmp_path, timeout_s=240.0)
    assert len(reasons) == 2
    assert [reason for reason in reasons if "no compiler" not in reason] == []
    assert others == (reasons, loss)
    assert loss > 0
