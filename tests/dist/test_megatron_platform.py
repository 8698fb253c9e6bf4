"""Test the basis of the Megatron student: CPU shim, optimizer arithmetic, learning rate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gkd.actor.megatron import optim
from gkd.actor.megatron.optim import GroupStepAdamW, OptimSpec
from tests.dist.helpers import run_ranks
from tests.dist.megatron_reference import make_hf_folder, make_micro_batches
from tests.dist.student_cases import build_student

# A child process, because the shim changes the process permanently.
_LIST_TOUCHED = "from gkd.actor.megatron.cpu_shim import install_cpu_shim; print('\\n'.join(install_cpu_shim()))"


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is a no-op with CUDA")
def test_shim_touches_exactly_these() -> None:
    """Fails if a Megatron upgrade moves, adds or drops a CUDA assumption that the shim covers."""
    command = [sys.executable, "-W", "ignore", "-c", _LIST_TOUCHED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == Path(__file__).with_name("shim_names.txt").read_text().split()


def _added_in_place(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Runs in a rank: count gradients that autograd gets for the embedding."""
    student = build_student("megatron", folder, rank, world_size)
    grads: list[torch.Tensor | None] = []
    (embedding,) = (param for name, param in student.model.named_params() if "word_embeddings" in name)
    embedding.register_hook(grads.append)
    student.accumulate(make_micro_batches(3))
    return {
        "grads": sum(grad is not None for grad in grads),
        "moved": bool(embedding.main_grad.any()),
    }


@pytest.mark.dist
@pytest.mark.cpu_only("tests what replaces apex")
@pytest.mark.parametrize("kind", ["qwen3", "qwen2_tied"])
def test_a_micro_batch_adds_to_the_gradients_in_place(tmp_path: Path, kind: str) -> None:
    """Fails if a micro-batch on the CPU makes a gradient of all rows of the embedding.

    The gradients' values: test_megatron_parity.
    """
    make_hf_folder(tmp_path, kind)
    (found,) = run_ranks(_added_in_place, 1, tmp_path)
    assert found == {"grads": 0, "moved": True}


@pytest.mark.parametrize("is_fused", [False, True])
def test_group_step_adamw_is_adamw(monkeypatch: pytest.MonkeyPatch, is_fused: bool) -> None:
    """Fails if the optimizer is not bit-exact with torch's AdamW, before or after a state reload; or if the fused
    update, which CUDA uses, counts steps otherwise or has another arithmetic.
    """
    monkeypatch.setattr(optim, "_is_fused", lambda params: is_fused)
    generator = torch.Generator().manual_seed(0)
    mine, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (7, 4)] for _ in range(2))
    options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    a, b = GroupStepAdamW(mine, **options), torch.optim.AdamW(theirs, **options)  # type: ignore[arg-type]
    for step in range(6):
        if step == 3:
            state = a.state_dict()
            a = GroupStepAdamW(mine, **options)  # type: ignore[arg-type]
            a.load_state_dict(state)
        for ours, plain in zip(mine, theirs, strict=True):
            ours.grad = torch.randn(ours.shape, generator=generator)
            plain.grad = ours.grad.clone()
        a.step()
        b.step()
        for ours, plain in zip(mine, theirs, strict=True):
            tolerance = 1e-6 if is_fused else 0.0
            assert torch.allclose(ours, plain, rtol=tolerance, atol=tolerance), step
    assert a.param_groups[0]["step"] == 6 and "step" not in a.state[mine[0]]


def test_learning_rates() -> None:
    """Fails if warm-up starts at 0, overshoots its last step, or the decay misses its floor at the last step."""
    constant = OptimSpec(lr=2.0, warmup_steps=4)
    assert [constant.lr_at(step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    linear = OptimSpec(lr=2.0, schedule="linear", total_steps=5, min_lr_ratio=0.5)
    assert [linear.lr_at(step) for step in range(6)] == [2.0, 1.75, 1.5, 1.25, 1.0, 1.0]
    cosine = OptimSpec(lr=2.0, schedule="cosine", warmup_steps=1, total_steps=4)
    assert [cosine.lr_at(step) for step in range(4)] == pytest.approx([2.0, 2.0, 1.0, 0.0])
    wsd = OptimSpec(lr=2.0, schedule="wsd", warmup_steps=2, decay_steps=4, total_steps=7, min_lr_ratio=0.5)
    assert [wsd.lr_at(step) for step in range(8)] == [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]
    no_plateau = OptimSpec(lr=2.0, schedule="wsd", warmup_steps=2, decay_steps=2, total_steps=4)
    assert [no_plateau.lr_at(step) for step in range(4)] == [1.0, 2.0, 1.0, 0.0]
