"""Compare logprobs and gradients of both backends, one rank, with Hugging Face in float32; float32 and bfloat16.

    python -m tests.gpu.bench_parity [--json FILE] [--device cuda|cpu]

In float32 the error itself has a limit. In bfloat16 it is compared with that of Hugging Face in bfloat16: the rounding
of weights and activations is in both. Packed sequences for ours, padded ones for the reference. One model has 5.8M
parameters; the other has experts, of which some get no token: on CUDA in bfloat16 Megatron multiplies them together.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gkd.data.batching import make_micro_batches
from tests.bench.command import add_device, parsed, parser, run_parts
from tests.bench.student_case import SIZES, PlainStep, make_student, only_rank, save_model, sequences
from tests.bench.teacher_report import Figure, Part, Table
from tests.dist.student_cases import grads_of

LIMITS = {"logprobs": 1e-4, "gradients": 1e-3}  # float32: nats, and share of a gradient's norm
N_EXPERTS, N_UNUSED = 32, 4
UNUSED = tuple(
    f".experts.{i}.{part}_proj.weight"
    for i in range(N_EXPERTS - N_UNUSED, N_EXPERTS)
    for part in ("gate", "up", "down")
)
AS_GOOD = 2.0  # bfloat16: times the error of Hugging Face in bfloat16


def measure(device: str, n_sequences: int) -> Part:
    rollouts, scores = sequences("even")
    packed, padded = (
        make_micro_batches(rollouts[:n_sequences], scores[:n_sequences], micro_batch_size=4, packed=is_packed)
        for is_packed in (True, False)
    )
    figures: list[Figure] = []
    rows: list[tuple[str | float, ...]] = []
    where = "cuda:0" if device == "cuda" else "cpu"
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as name, only_rank(device):
        for model, save in (("", save_model), ("experts, ", _save_with_experts)):
            folder = Path(name) / f"model {model}"
            save(folder)
            exact = _plain(PlainStep(folder, list(padded), torch.float32, device))
            assert not any(grad.any() for name, grad in exact[1].items() if name.endswith(UNUSED))
            for dtype in (torch.float32, torch.bfloat16):
                plain = _errors(_plain(PlainStep(folder, list(padded), dtype, device)), exact)
                for kind in ("megatron", "fsdp2"):
                    student = make_student(kind, folder, dtype=dtype, device=where)
                    logprobs = torch.cat([part.cpu() for part in student.compute_logprobs(packed)])
                    found = _errors((logprobs, grads_of(student, packed)), exact)
                    for what, error in found.items():
                        label = f"{model}{kind}, {str(dtype)[6:]}: {what}"
                        if dtype == torch.float32:
                            figures.append(Figure(f"{label}, largest error", error, at_most=LIMITS[what]))
                        else:
                            ratio = error / plain[what]
                            figures.append(Figure(f"{label}, error / Hugging Face's", ratio, at_most=AS_GOOD))
                        rows.append((label, error, plain[what]))
                    del student
    what = "Largest difference of a logprob in nats, and of a gradient as a share of its norm, from float32."
    table = Table("errors", ("what", "error", "Hugging Face in the same dtype"), rows)
    return Part("parity", what, figures, [table], {"device": device})


def _save_with_experts(folder: Path) -> None:
    """Save a random Qwen3-MoE of 6 layers; its last experts never get a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    experts = {"num_experts": N_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[-N_UNUSED:] = 0.0  # a score of 0; some of the 28 others are always above it
    model.save_pretrained(folder)


def _plain(step: PlainStep) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs = torch.cat([part.cpu() for part in step.logprobs()])
    step.backward()
    return logprobs, {name: grad.float().cpu() for name, grad in step.gradients().items()}


def _errors(found: tuple[Tensor, Mapping[str, Any]], exact: tuple[Tensor, Mapping[str, Tensor]]) -> dict[str, float]:
    assert found[1].keys() == exact[1].keys(), found[1].keys() ^ exact[1].keys()
    gradients = [
        float((torch.as_tensor(found[1][name]).float().cpu() - grad).norm() / (grad.norm() or _if_zero(name)))
        for name, grad in exact[1].items()
    ]
    return {"logprobs": float((found[0] - exact[0]).abs().max()), "gradients": max(gradients)}


def _if_zero(name: str) -> float:
    """Return what to divide the error of a gradient by if its norm is 0.

    An unused expert must have none. Another expert may get its only token by rounding.
    """
    return 1e-9 if name.endswith(UNUSED) else 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.bench_parity", __doc__ or "", ("parity",), rounds=1)
    add_device(made, "cuda")
    args = parsed(made, ("parity",), argv)
    n_sequences = 2 if args.tiny and args.device == "cuda" else 16  # a stand-in card is slow
    return run_parts(args, lambda _: measure(args.device, n_sequences))


if __name__ == "__main__":
    sys.exit(main())
