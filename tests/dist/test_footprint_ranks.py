"""Predicted memory against real ranks: what a layer keeps of a token, and every parameter.

Of activations, counted are the storages of the tensors that a forward pass saves, each once, parameters left out. Two
depths of the same model are compared, so that what comes before and after the layers falls out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_actor import LoraConfig
from gkd.hf.model_dims import read_dims
from gkd.hf.model_folder import ModelFolder
from gkd.memory.footprint.actor import itemsize, layer_bytes, megatron_stages
from gkd.types import MicroBatch
from tests.dist.helpers import run_ranks
from tests.dist.student_cases import build_student

DEPTHS = (2, 4)
N_PROMPT, N_RESPONSE, N_SEQUENCES = 40, 88, 2  # 256 tokens
SIZES = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.cpu_only("counts what autograd keeps with the kernels of the CPU"),
]
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart_cpu.yaml"
# name -> (overrides, model), all of two processes
LAYOUTS: dict[str, tuple[tuple[str, ...], str]] = {
    "dp 2": ((), "qwen2"),
    "tp 2": (("actor.tp=2",), "qwen3"),
    "pp 2": (("actor.pp=2",), "tied"),
    "vpp 2": (("actor.pp=2", "actor.vpp=2"), "qwen2"),
    "ep 2": (("actor.ep=2",), "qwen3_moe"),
    "experts on both": ((), "qwen3_moe"),
    "adapters": (("actor.tp=2", "actor.lora.rank=8"), "qwen3"),
}


@dataclass(frozen=True)
class Case:
    backend: str
    kind: str
    dtype: str
    packed: bool = True
    recompute: str = "none"
    tp: int = 1
    sequence_parallel: bool = False
    lora: bool = False
    cp: int = 1


CASES = [
    Case("megatron", "qwen2", "float32", packed=False),
    Case("megatron", "qwen3", "bfloat16"),
    Case("megatron", "qwen2", "float32", recompute="full"),
    Case("megatron", "qwen3_moe", "bfloat16"),
    Case("megatron", "qwen2", "float32", lora=True),
    Case("megatron", "qwen2", "bfloat16", tp=2),
    Case("megatron", "qwen3", "float32", tp=2, sequence_parallel=True),
    Case("megatron", "qwen2", "bfloat16", packed=False, cp=2),
    Case("megatron", "qwen3", "bfloat16", cp=2, recompute="selective"),
    Case("megatron", "gemma3_text", "bfloat16"),
    Case("fsdp2", "qwen2", "float32"),
    Case("fsdp2", "gemma3_text", "bfloat16", packed=False),
    Case("fsdp2", "qwen3", "bfloat16", packed=False),
    Case("fsdp2", "qwen3_moe", "float32", packed=False),
    Case("fsdp2", "qwen2", "bfloat16", recompute="full"),
    Case("fsdp2", "qwen2", "float32", cp=2),
]


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    root = tmp_path_factory.mktemp("footprint")
    _save_models(root)
    return root, run_ranks(_look, 2, root, timeout_s=300.0)


def test_a_layer_keeps_what_the_coefficient_says(looked: tuple[Path, Any]) -> None:
    """Fails if a new version of torch, Megatron or transformers saves other tensors, or the formula forgets one that is
    a sixth of a layer; what recomputation keeps is exact.
    """
    root, ((found, _), _) = looked
    ratios = {}
    for case, measured in zip(CASES, found, strict=True):
        config, dims = _case_config(case), _model(root / f"{case.kind}2").dims
        wanted = layer_bytes(config, dims, 0, on_cpu=True)
        if case.recompute == "full":
            wanted = itemsize(config) * dims.hidden_size
        ratios[case] = wanted / measured
    wrong = [
        f"{case}: {ratio:.3f}"
        for case, ratio in ratios.items()
        if abs(ratio - 1) > (0.02 if case.recompute == "full" else 0.17)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_rank_holds_the_parameters_that_are_counted(looked: tuple[Path, Any]) -> None:
    """Fails if a layout's stages are cut otherwise than predicted, or the optimizer's share is."""
    root, ranks = looked
    found = [held for _, held in ranks]
    for name, (overrides, kind) in LAYOUTS.items():
        config, model = _config(overrides), _model(root / f"{kind}4")
        expected = _expected(config, model)
        for rank, held in enumerate(found):
            want = expected[rank] if config.actor.pp == 2 else expected[0]
            params, grads, owned = held[name]
            assert params == want[0], (name, rank)
            # Buffers are padded, and the share of a rank ends where the other's begins, within a parameter.
            assert want[1] <= grads <= want[1] + 2 * 2**10, (name, rank)
            assert owned == pytest.approx(want[2], abs=2 * 2**10), (name, rank)
        if config.actor.pp == 1 and model.dims.moe is None and config.actor.tp == 1:
            assert sum(held[name][2] for held in found) == expected[0][0], name


def _look(rank: int, world_size: int, root: Path) -> tuple[list[float], dict[str, tuple[int, int, int]]]:
    """Runs in a rank; see `_measure` and `_held`."""
    return _measure(rank, world_size, root), _held(rank, world_size, root)


def _case_config(case: Case) -> Config:
    sequence_parallel = str(case.sequence_parallel).lower()
    lora = ("actor.lora.rank=1",) if case.lora else ()
    layout = (f"actor.tp={case.tp}", f"actor.cp={case.cp}", f"actor.sequence_parallel={sequence_parallel}")
    settings = (f"actor.strategy={case.backend}", f"model.dtype={case.dtype}", f"actor.recompute={case.recompute}")
    return _config((*settings, *layout, *lora))


def _model(folder: Path) -> ModelFolder:
    config_json = json.loads((folder / "config.json").read_text())
    return ModelFolder(config_json, read_dims(config_json), None)


def _save_models(root: Path) -> None:
    import transformers as tf

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    del_head = {key: value for key, value in SIZES.items() if key != "head_dim"}
    for depth in DEPTHS:
        layers = {"num_hidden_layers": depth}
        models: dict[str, Any] = {
            "qwen2": tf.Qwen2ForCausalLM(tf.Qwen2Config(**del_head, **layers)),
            "tied": tf.Qwen2ForCausalLM(tf.Qwen2Config(**del_head | layers | {"tie_word_embeddings": True})),
            "qwen3": tf.Qwen3ForCausalLM(tf.Qwen3Config(**SIZES, **layers)),
            "gemma3_text": tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SIZES, **layers)),
            "qwen3_moe": tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**SIZES, **layers, **experts)),
        }
        for kind, model in models.items():
            model.save_pretrained(root / f"{kind}{depth}")


def _measure(rank: int, world_size: int, root: Path) -> list[float]:
    """Runs in a rank: bytes a layer and token that autograd saves, of each case."""
    found = []
    for case in CASES:
        few, many = (_saved_bytes(rank, world_size, root / f"{case.kind}{depth}", case) for depth in DEPTHS)
        n_tokens = N_SEQUENCES * (N_PROMPT + N_RESPONSE) // case.cp
        found.append((many - few) / (DEPTHS[1] - DEPTHS[0]) / n_tokens)
    return found


def _saved_bytes(rank: int, world_size: int, folder: Path, case: Case) -> int:
    from megatron.core import parallel_state

    from gkd.data.batching import make_micro_batches
    from tests.bench.student_case import random_sequences

    rollouts, scores = random_sequences([(N_PROMPT, N_RESPONSE)] * N_SEQUENCES, np.random.default_rng(3), 256, 4)
    batches = make_micro_batches(rollouts, scores, micro_batch_size=N_SEQUENCES, packed=case.packed)
    is_fsdp = case.backend == "fsdp2"
    settings: dict[str, Any] = {
        "dtype": getattr(torch, case.dtype),
        "device": torch.device("cpu"),
        "recompute": case.recompute,
        "lora": LoraConfig(rank=1) if case.lora else None,  # what their outputs take is not predicted
        **({"packing": case.packed} if is_fsdp else {"sequence_parallel": case.sequence_parallel}),
    }
    student = build_student(case.backend, folder, rank, world_size, tp=case.tp, cp=case.cp, **settings)
    try:
        return saved_bytes(student, batches[0])
    finally:
        parallel_state.destroy_model_parallel()


def saved_bytes(student: Any, whole: MicroBatch) -> int:
    """Bytes of the storages that a forward pass of one stage saves, parameters left out. Collective.

    Those that fully_shard gathers around a layer are freed when it is over, so bytes are counted at the end.
    """
    saved: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    batch = student.columns.part_of(whole)
    if hasattr(student, "layout"):
        (module,) = student.model.chunks
        tensors = batch.tokens, batch.position_ids, batch.loss_index
        forward = partial(module, *tensors, cu_seqlens=batch.cu_seqlens, with_logits=False)
    else:
        from gkd.actor.fsdp import passes

        module = student.model
        options = {"targets": batch.targets, "loss": student.loss, "fused": True}
        forward = partial(passes.forward, module, batch, student.device, **options)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    own = {p.untyped_storage().data_ptr() for p in module.parameters() if type(p) is torch.nn.Parameter}
    n_bytes = sum(storage.nbytes() for key, storage in saved.items() if key not in own)
    del result  # it kept the graph, and with it the tensors, alive
    return n_bytes


def _config(overrides: tuple[str, ...]) -> Config:
    return load_config(QUICKSTART, ["trainer.n_gpus_per_node=2", "model.dtype=float32", *overrides])


def _expected(config: Config, model: ModelFolder) -> list[tuple[int, int, int]]:
    """(parameters, of them trained, of them updated here) of each stage's ranks."""
    return [
        (stage.params + stage.adapters, stage.adapters or stage.params, stage.owned)
        for stage in megatron_stages(config, model)
    ]


def _held(rank: int, world_size: int, root: Path) -> dict[str, tuple[int, int, int]]:
    """Runs in a rank: (parameters, numbers in the gradient buffers, numbers that the optimizer updates), by layout."""
    from megatron.core import parallel_state

    found = {}
    for name, (overrides, kind) in LAYOUTS.items():
        actor = (config := _config(overrides)).actor
        settings = {"device": torch.device("cpu"), "dtype": getattr(torch, config.model.dtype), "lora": actor.lora}
        ranks = {"tp": actor.tp, "pp": actor.pp, "vpp": actor.vpp, "ep": actor.ep}
        student = build_student("megatron", root / f"{kind}4", rank, world_size, **settings, **ranks)
        params = sum(param.numel() for chunk in student.model.chunks for param in chunk.parameters())
        buffers = [b for ddp in student._ddps for b in [*ddp.buffers, *ddp.expert_parallel_buffers]]
        optimizers: list[Any] = student._optimizer.chained_optimizers
        owned = sum(p.numel() for part in optimizers for group in part.param_groups for p in group["params"])
        found[name] = (params, sum(buffer.grad_data.numel() for buffer in buffers), owned)
        parallel_state.destroy_model_parallel()
    return found
