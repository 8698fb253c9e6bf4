"""Compare the Megatron student with plain HF + AdamW for every kind of parallelism. float32.

What this does not prove: bfloat16 rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device import rank_device
from tests.dist.helpers import run_ranks
from tests.dist.megatron_reference import (
    BETAS,
    CLIP,
    EPS,
    KINDS,
    LR,
    WEIGHT_DECAY,
    Reference,
    make_hf_folder,
    make_micro_batches,
    train_reference,
)
from tests.dist.student_cases import grads_of, weights

N_STEPS = 5
# name -> (world size, tp, pp)
LAYOUTS = {"tp1": (1, 1, 1), "tp2": (2, 2, 1), "pp2": (2, 1, 2), "dp2": (2, 1, 1), "tp2_pp2": (4, 2, 2)}
# Tested in these layouts only; the others are tested in all.
SOME_LAYOUTS = {
    "llama3_rope": ("tp1",),
    "smollm3": ("pp2",),
    "olmo2": ("tp2", "pp2"),
    "ministral3": ("pp2",),
    "gemma3_text": ("pp2",),
    "seed_oss": ("tp2",),
}


def kinds_of(layout: str) -> list[str]:
    return [kind for kind in KINDS if layout in SOME_LAYOUTS.get(kind, LAYOUTS)]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one HF model and one reference run per kind."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("parity")
    for kind in KINDS:
        make_hf_folder(root / kind, kind)
        torch.save(train_reference(root / kind, N_STEPS), root / f"{kind}.pt")
    return root


@pytest.fixture(scope="module")
def results(references: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that measures a layout on all ranks; one spawn per world size runs all of its layouts."""

    @functools.cache
    def spawned(size: int) -> list[dict[str, dict[str, Any]]]:
        names = [name for name, layout in LAYOUTS.items() if layout[0] == size]
        return run_ranks(_measure_all, size, references, names, timeout_s=200.0)

    return lambda name: [rank[name] for rank in spawned(LAYOUTS[name][0])]


def _measure_all(rank: int, world_size: int, root: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Measure, in a rank, every layout of this world size in new Megatron groups."""
    from megatron.core import parallel_state

    measured = {}
    for name in names:
        measured[name] = _measure(rank, world_size, root, LAYOUTS[name], kinds_of(name))
        parallel_state.destroy_model_parallel()
    return measured


def _measure(
    rank: int, world_size: int, root: Path, spec: tuple[int, int, int], kinds: list[str]
) -> dict[str, dict[str, Any]]:
    """Return, in a rank, the differences from the reference per kind."""
    from gkd.actor.common.optim_spec import OptimSpec
    from gkd.actor.megatron.layout import ParallelLayout
    from gkd.actor.megatron.student import MegatronStudent
    from gkd.config.loss_spec import LossSpec
    from tests.dist.megatron_logits import logits_of

    _, tp, pp = spec
    layout = ParallelLayout(tp=tp, pp=pp, world_size=world_size, rank=rank)
    optim = OptimSpec(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip_grad=CLIP)
    measured = {}
    for kind in kinds:
        reference: Reference = torch.load(root / f"{kind}.pt", weights_only=False)
        student = MegatronStudent(
            root / kind,
            layout,
            optim=optim,
            loss=LossSpec(),
            dtype=torch.float32,
            device=rank_device(),
            seed=1,
            recompute="full" if kind in ("qwen3", "ministral3", "gemma3_text") else "none",
        )
        result: dict[str, Any] = {}
        result["coordinates"] = (layout.tp_rank, layout.pp_rank, layout.dp_rank)
        groups = student.model.groups
        result["megatron_coordinates"] = (groups.tp.rank(), groups.pp.rank(), groups.dp.rank())
        logits = logits_of(student, reference.probe)
        result["logits_diff"] = 0.0 if logits is None else _max_diff(logits, reference.probe_logits)
        original = _load_folder(root / kind)
        exported = weights(student)
        result["round_trip"] = all(torch.equal(tensor, original[name]) for name, tensor in exported.items())
        result["names"] = sorted(exported)
        result["expected_names"] = sorted(original)
        grads = grads_of(student, _mine(layout, 0))
        result["grad_diff"] = max(_max_diff(grad, reference.grads[name]) for name, grad in grads.items())
        result["grad_names"] = sorted(grads)
        result["eval_loss"] = student.evaluate(_mine(layout, 0)).loss
        stats = [student.train_step(_mine(layout, 0))]
        after_one = weights(student).items()
        result["weight_diff"] = max(_max_diff(w, reference.weights_after_one[name]) for name, w in after_one)
        stats += [student.train_step(_mine(layout, step)) for step in range(1, N_STEPS)]
        result["losses"] = [s.loss for s in stats]
        result["grad_norms"] = [s.grad_norm for s in stats]
        result["n_tokens"] = [s.n_loss_tokens for s in stats]
        result["teacher_mass"] = stats[0].extra["loss/teacher_topk_mass"]
        measured[kind] = result
    return measured


def _mine(layout: Any, step: int) -> list[Any]:
    """Return three of the four micro-batches for DP rank 0, the last for DP rank 1: unequal counts on purpose."""
    batches = make_micro_batches(step)
    if layout.dp == 1:
        return batches
    return batches[:3] if layout.dp_rank == 0 else batches[3:]


def _max_diff(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a.cpu() - b.cpu()).abs().max())


def _load_folder(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, name, marks=pytest.mark.slow if size > 2 else ())
        for name, (size, *_) in LAYOUTS.items()
        for kind in kinds_of(name)
    ],
)
class TestParity:
    """One class, so that a failure names layout and architecture."""

    def test_forward_and_weights(self, results: Any, layout: str, kind: str) -> None:
        """Fails if import maps a tensor wrongly, export is not its inverse, or a stage exports names of another."""
        ranks = [rank[kind] for rank in results(layout)]
        assert max(r["logits_diff"] for r in ranks) <= 1e-4
        assert all(r["round_trip"] for r in ranks)
        assert sorted({name for r in ranks for name in r["names"]}) == ranks[0]["expected_names"]
        assert all(r["coordinates"] == r["megatron_coordinates"] for r in ranks)

    def test_gradients(self, results: Any, references: Path, layout: str, kind: str) -> None:
        """Fails if loss scaling, a TP/PP/DP reduction, recompute or the gradient of the loss is wrong."""
        reference: Reference = torch.load(references / f"{kind}.pt", weights_only=False)
        assert max(float(g.abs().max()) for g in reference.grads.values()) > 0.01  # otherwise 1e-5 is not a test
        ranks = [rank[kind] for rank in results(layout)]
        assert max(r["grad_diff"] for r in ranks) <= 1e-5
        assert sorted({name for r in ranks for name in r["grad_names"]}) == sorted(reference.grads)

    def test_training(self, results: Any, references: Path, layout: str, kind: str) -> None:
        """Fails if AdamW, weight-decay groups, clipping, or the reported statistics differ from plain training."""
        reference: Reference = torch.load(references / f"{kind}.pt", weights_only=False)
        ranks = [rank[kind] for rank in results(layout)]
        assert ranks[0]["teacher_mass"] < 0.95  # the distributions are truncated
        for r in ranks:
            assert r["weight_diff"] <= 1e-5
            assert r["losses"] == pytest.approx(reference.losses, abs=1e-5)
            assert r["grad_norms"] == pytest.approx(reference.grad_norms, abs=1e-4)
            assert r["eval_loss"] == pytest.approx(r["losses"][0], abs=1e-6)
            assert r["losses"] == ranks[0]["losses"] and r["n_tokens"] == ranks[0]["n_tokens"]
