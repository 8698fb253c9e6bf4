"""Compare LoRA on the Megatron student with peft and with fsdp2, for every kind of parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gkd.config.schema_actor import LoraConfig
from tests.device import host
from tests.dist.helpers import caught, run_ranks
from tests.dist.megatron_reference import make_hf_folder, make_micro_batches
from tests.dist.peft_reference import train_peft
from tests.dist.student_cases import as_numpy, build_student, packed, same_weights, weights

pytestmark = pytest.mark.dist

N_STEPS = 3
ALL = LoraConfig(rank=4, alpha=8.0)
# Without k_proj and up_proj, parts of a fused layer have no adapter.
SOME = LoraConfig(rank=2, alpha=3.0, targets=["self_attn.q_proj", "v_proj", "gate_proj", "down_proj"])
ATTENTION = LoraConfig(rank=2, alpha=4.0, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
# name -> (kind of model, adapters, settings of the student)
CASES: dict[str, tuple[str, LoraConfig, dict[str, Any]]] = {
    "tp2": ("qwen3", ALL, {"tp": 2}),
    "tp2sp": ("qwen3", ALL, {"tp": 2, "sequence_parallel": True}),
    "tp2 recomputed": ("qwen2_tied", SOME, {"tp": 2, "recompute": "full"}),
    "pp2": ("qwen2_tied", SOME, {"pp": 2}),
    "pp2 recomputed": ("qwen3", ALL, {"pp": 2, "recompute": "full", "fused_lm_head": False}),
    "dp2": ("qwen3", ALL, {}),
    "ep2": ("qwen3_moe", ATTENTION, {"ep": 2}),
}
KINDS = ("qwen3", "qwen2_tied", "qwen3_moe")


def _measure(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Measure, in a rank, everything that the tests below check."""
    result: dict[str, Any] = {name: _measure_case(rank, root, name) for name in CASES}
    for kind, lora in (("qwen3", ALL), ("qwen3_moe", ATTENTION)):
        student = build_student("fsdp2", root / kind, rank, world_size, lora=lora)
        first = {name: place.tensor.full_tensor().detach() for name, place in student.trained_places().items()}
        result["fsdp2 " + kind] = {"first": as_numpy(first)} | _train(student, rank, 2)
        student.save_hf(root / f"saved fsdp2 {kind}", root / kind)
    half = _build(root, "qwen3_bf16", rank, lora=ALL, dtype=torch.bfloat16, tp=2)
    base_kept = same_weights(weights(half), load_file(root / "qwen3_bf16" / "model.safetensors"))
    dtypes = {str(param.dtype) for _, param in half.model.named_params() if param.requires_grad}
    result["bf16"] = {"base kept": base_kept, "dtypes": dtypes} | _train(half, 0, 1)
    experts = LoraConfig(rank=2, targets=["q_proj", "gate_proj"])
    result["experts"] = caught(lambda: _build(root, "qwen3_moe", rank, lora=experts))
    result["head"] = caught(lambda: _build(root, "qwen3", rank, lora=LoraConfig(rank=2, targets=["lm_head"])))
    return result


def _build(root: Path, kind: str, rank: int, **changes: Any) -> Any:
    """Build a student; replaces the Megatron groups of the previous one."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return build_student("megatron", root / kind, rank, 2, **changes)


def _measure_case(rank: int, root: Path, name: str) -> dict[str, Any]:
    from gkd.actor.megatron.hf_export import iter_full
    from gkd.memory.states import OPTIMIZER

    kind, lora, settings = CASES[name]
    student = _build(root, kind, rank, lora=lora, **settings)
    entries, layout = student.model.trained_entries(), student.layout

    def adapters() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in iter_full(student.model, entries)}

    batches = make_micro_batches(9)
    mine = batches[layout.dp_rank :: layout.dp]
    result: dict[str, Any] = {
        "first": as_numpy(adapters()),
        "base": [host(t) for t in student.compute_logprobs(mine)],
    }
    base = {name: param.clone() for name, param in student.model.named_params() if not param.requires_grad}
    result["first export"] = as_numpy(weights(student))
    result |= _train(student, layout.dp_rank, layout.dp)
    result["last"], result["merged"] = as_numpy(adapters()), as_numpy(weights(student))
    result["frozen"] = same_weights(base, {name: dict(student.model.named_params())[name] for name in base})
    without = student.compute_logprobs(mine, disable_adapter=True)
    result["without"] = [host(tensor) for tensor in without]
    result["with"] = [host(tensor) for tensor in student.compute_logprobs(mine)]
    trained = [param for param in student.model.chunks[0].parameters() if param.requires_grad]
    main = student.live_states()[OPTIMIZER]
    student.save_hf(root / f"saved {name}", root / kind)
    result["n"] = (sum(param.numel() for param in trained), sum(tensor.numel() for tensor in main))
    return result


def _train(student: Any, index: int, count: int) -> dict[str, Any]:
    """Train on this data-parallel rank's share; every other step is packed."""
    losses, norms = [], []
    for step in range(N_STEPS):
        batches = make_micro_batches(step)[index::count]
        stats = student.train_step([packed(batch) for batch in batches] if step % 2 else batches)
        losses.append(stats.loss)
        norms.append(stats.grad_norm)
    return {"losses": losses, "norms": norms}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    for kind in KINDS:
        make_hf_folder(folder / kind, kind)
    make_hf_folder(folder / "qwen3_bf16", "qwen3", dtype=torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    return run_ranks(_measure, 2, root, timeout_s=200.0)


def _joined(ranks: list[dict[str, Any]], name: str, key: str) -> dict[str, torch.Tensor]:
    """Return the tensors of all stages."""
    return {tensor: torch.from_numpy(array) for rank in ranks for tensor, array in rank[name][key].items()}


@pytest.mark.parametrize("name", CASES)
def test_adapters_train_like_peft(ranks: list[dict[str, Any]], root: Path, name: str) -> None:
    """Fails if a layout starts from other adapters, trains them differently, or changes the base."""
    kind, lora, _ = CASES[name]
    first, last, merged = (_joined(ranks, name, key) for key in ("first", "last", "merged"))
    losses, expected = train_peft(root / kind, lora, first, N_STEPS)
    base = load_file(root / kind / "model.safetensors")
    assert same_weights(_joined(ranks, name, "first export"), base)
    for rank in ranks:
        assert rank[name]["losses"] == pytest.approx(losses, abs=1e-5)
        assert rank[name]["frozen"]
    moved = {weight for weight in base if not torch.equal(merged[weight], base[weight])}
    assert moved == {weight for weight in base if weight.removesuffix(".weight").endswith(tuple(lora.targets))}
    assert max(float((merged[weight] - expected[weight]).abs().max()) for weight in moved) <= 1e-5
    assert min(float((last[factor] - first[factor]).abs().max()) for factor in first) > 1e-4


@pytest.mark.parametrize(
    ("name", "kind"), [("tp2", "qwen3"), ("tp2sp", "qwen3"), ("dp2", "qwen3"), ("ep2", "qwen3_moe")]
)
def test_both_backends_are_equal(ranks: list[dict[str, Any]], name: str, kind: str) -> None:
    """Fails if the same seed gives other adapters on fsdp2, or a gradient norm counts a replicated factor twice."""
    for rank in ranks:
        ours, theirs = rank[name], rank[f"fsdp2 {kind}"]
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4)
    first, expected = _joined(ranks, name, "first"), _joined(ranks, f"fsdp2 {kind}", "first")
    assert same_weights(first, expected)


@pytest.mark.parametrize("name", CASES)
def test_the_base_is_a_reference(ranks: list[dict[str, Any]], name: str) -> None:
    """Fails if logprobs without adapters are not those of the base, or differ between stages or TP ranks."""
    for rank in ranks:
        for found, base, trained in zip(*(rank[name][key] for key in ("without", "base", "with")), strict=True):
            assert (found == base).all() and abs(trained - base).max() > 1e-3
    if name != "dp2" and name != "ep2":
        one, two = (rank[name]["with"] for rank in ranks)
        assert all((a == b).all() for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_only_adapters_have_an_optimizer_state(ranks: list[dict[str, Any]], name: str) -> None:
    """Fails if frozen weights have gradients' or optimizer's memory: adapters would save nothing."""
    for rank in ranks:
        n_trained, n_states = rank[name]["n"]
        n_owned = n_trained / (2 if name in ("dp2", "ep2") else 1)
        assert n_states == pytest.approx(3 * n_owned, rel=0.05)


@pytest.mark.parametrize("name", [*CASES, "fsdp2 qwen3"])
def test_peft_loads_saved_adapters(ranks: list[dict[str, Any]], root: Path, name: str) -> None:
    """Fails if the folder `adapter` of an export is not one of peft, or base + adapters differ from the export."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    kind, saved = CASES[name][0] if name in CASES else "qwen3", root / f"saved {name}"
    base = AutoModelForCausalLM.from_pretrained(root / kind, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, saved / "adapter")
    n_adapters = sum("lora_" in key for key in model.state_dict())
    assert n_adapters == len(load_file(saved / "adapter" / "adapter_model.safetensors"))
    merged, exported = model.merge_and_unload().state_dict(), load_file(saved / "model.safetensors")
    names = exported.keys() & merged.keys()  # transformers keeps the experts of a layer in one tensor
    assert max(float((exported[key] - merged[key]).abs().max()) for key in names) <= 1e-6
    untrained = load_file(root / kind / "model.safetensors")
    assert max(float((exported[key] - untrained[key]).abs().max()) for key in names) > 1e-4


def test_bfloat16_and_refusals(ranks: list[dict[str, Any]]) -> None:
    """Fails if adapters of a bfloat16 model lose precision, or experts or the LM head are adapted silently."""
    for rank in ranks:
        assert rank["bf16"]["base kept"] and rank["bf16"]["dtypes"] == {"torch.float32"}
        assert rank["bf16"]["losses"] == pytest.approx(rank["tp2"]["losses"], abs=2e-2)
        for case, target in (("experts", "gate_proj"), ("head", "lm_head")):
            kind, text = rank[case]
            assert kind == "ConfigError" and "actor.lora.targets" in text and target in text
