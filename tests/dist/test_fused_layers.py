"""Compare the layers of CUDA (compiled operations, grouped experts) with the plain ones, on the CPU or on cards.

Slow: on one core torch.compile takes 27 s for the rotary embedding alone, and 64 s for a packed dense model. CI traces
the rotary embedding with dynamo, without C++ (tests/unit/test_megatron_layers.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gkd.actor.megatron import model as megatron_model
from gkd.config.schema_actor import LoraConfig
from tests.device import host, on_cuda
from tests.dist.helpers import run_ranks
from tests.dist.hf_models import make_model_folder
from tests.dist.megatron_reference import make_hf_folder, make_micro_batches
from tests.dist.student_cases import as_numpy, build_student, grads_of, packed

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TORCHDYNAMO_DISABLE") == "1", reason="nothing is compiled"),
]


LORA = LoraConfig(rank=4, alpha=8.0, targets=["q_proj", "k_proj", "down_proj"])


def _measure(rank: int, world_size: int, root: Path, kinds: Sequence[str], settings: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state

    found: dict[str, Any] = {}
    for fused in (False, True):
        megatron_model.is_fused = lambda layers, device, on=fused: on and layers == "auto"
        for kind in kinds:
            student = build_student("megatron", root / kind, rank, world_size, **settings)
            classes = {type(module).__name__ for _, module in student.model.named_modules()}
            assert ("GroupedExperts" in classes) == (fused and kind == "qwen3_moe" and not on_cuda())  # 16 bits there
            assert any(name.startswith("Fused") for name in classes) == fused
            assert student.model.config.bias_activation_fusion == student.model.config.apply_rope_fusion == fused
            params = dict(student.model.named_params())
            for adapter in student.model.adapters:  # a product of zeros would have a gradient for B alone
                torch.nn.init.constant_(params[adapter.b.param], 0.1)
            batches = make_micro_batches(0)
            for how, micro_batches in (("padded", batches), ("packed", [packed(batch) for batch in batches])):
                logprobs = student.compute_logprobs(micro_batches)
                grads = grads_of(student, micro_batches)
                found[kind, how, fused] = [host(x) for x in logprobs], as_numpy(grads)
            parallel_state.destroy_model_parallel()
    return found


CASES: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "one rank": (1, ("qwen3", "qwen3_moe", "gemma3_text", "smollm3", "ministral3"), {}),
    "adapters, recomputed": (1, ("qwen3",), {"lora": LORA, "recompute": "full"}),
    "tensor parallel": (2, ("qwen3",), {"tp": 2, "sequence_parallel": True, "recompute": "full"}),
    "tensor parallel, adapters": (2, ("qwen3",), {"tp": 2, "sequence_parallel": True, "lora": LORA}),
}


@pytest.mark.parametrize("case", CASES)
def test_compiled_layers_compute_what_the_plain_ones_do(tmp_path: Path, case: str) -> None:
    """Fails if a compiled kernel computes other numbers: a wrong position in a pack, a wrong derivative."""
    n_ranks, kinds, settings = CASES[case]
    for kind in kinds:
        make = make_model_folder if kind == "qwen3_moe" else make_hf_folder
        make(tmp_path / kind, kind)
    for found in run_ranks(_measure, n_ranks, tmp_path, kinds, settings, timeout_s=900.0):
        _compare(found)


def _compare(found: dict[str, Any]) -> None:
    for (kind, how, fused), (logprobs, grads) in found.items():
        if not fused:
            continue
        plain_logprobs, plain_grads = found[kind, how, False]
        for ours, plain in zip(logprobs, plain_logprobs, strict=True):
            assert abs(ours - plain).max() < 1e-5, (kind, how)
        assert grads.keys() == plain_grads.keys()
        for name, grad in grads.items():
            scale = abs(plain_grads[name]).max()
            assert scale > 0 and abs(grad - plain_grads[name]).max() <= 1e-5 * scale, (kind, how, name)
