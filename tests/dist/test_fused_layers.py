"""The layers of CUDA (compiled operations, grouped experts) on the CPU, against the plain ones. One process.

Slow: on one core torch.compile takes 27 s for the rotary embedding alone, and 64 s for a packed dense model. CI traces
the rotary embedding with dynamo, without C++ (tests/unit/test_megatron_layers.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gkd.actor.megatron import model as megatron_model
from tests.device import host
from tests.dist.helpers import run_ranks
from tests.dist.hf_models import make_model_folder
from tests.dist.megatron_reference import make_hf_folder, make_micro_batches
from tests.dist.student_cases import as_numpy, build_student, grads_of, packed

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.cpu_only("the layers of CUDA on a CPU; tests.gpu.bench_parity compares them on a GPU"),
]


def _measure(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    from megatron.core import parallel_state

    found: dict[str, Any] = {}
    for fused in (False, True):
        megatron_model.is_fused = lambda layers, device, on=fused: on and layers == "auto"
        for kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            student = build_student("megatron", root / kind, rank, world_size)
            classes = {type(module).__name__ for _, module in student.model.named_modules()}
            assert ("GroupedExperts" in classes) == (fused and kind == "qwen3_moe")
            assert student.model.config.bias_activation_fusion == student.model.config.apply_rope_fusion == fused
            batches = make_micro_batches(0)
            for how, micro_batches in (("padded", batches), ("packed", [packed(batch) for batch in batches])):
                logprobs = student.compute_logprobs(micro_batches)
                grads = grads_of(student, micro_batches)
                found[kind, how, fused] = [host(x) for x in logprobs], as_numpy(grads)
            parallel_state.destroy_model_parallel()
    return found


def test_compiled_layers_compute_what_the_plain_ones_do(tmp_path: Path) -> None:
    """Fails if a compiled kernel computes other numbers: a wrong position in a pack, a wrong derivative."""
    make_hf_folder(tmp_path / "qwen3", "qwen3")
    make_hf_folder(tmp_path / "gemma3_text", "gemma3_text")
    make_model_folder(tmp_path / "qwen3_moe", "qwen3_moe")
    (found,) = run_ranks(_measure, 1, tmp_path, timeout_s=400.0)
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
