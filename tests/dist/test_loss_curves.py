"""Compare loss curves of the Megatron student in every layout with plain HF + AdamW.

Models of four layers, so that two stages can hold two chunks each. Any wrong gradient changes the later
steps of a curve; the gradients of the first step are also compared by name. The negative controls make mistakes on
purpose, to show that the curves detect them.

What this does not prove: Transformer Engine's layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from gkd.types import MicroBatch
from tests.dist.helpers import destroy_groups, run_ranks
from tests.dist.megatron_reference import Reference, make_micro_batches, save_references, train_bf16_reference
from tests.dist.student_cases import build_student, grads_of, packed, share, step_in_parts

pytestmark = pytest.mark.dist
N_STEPS = 20
N_STEPS_SHORT = 5
N_BATCHES = 2  # used in turn, so that the curve goes down
N_LAYERS = 4
FLOAT32_BOUND, BFLOAT16_BOUND, VISIBLE = 1e-5, 2e-3, 1e-4


@dataclass(frozen=True)
class Case:
    """A layout and its training settings."""

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    packed: bool = False
    fused: bool = True
    kind: str = "qwen3"
    dtype: torch.dtype = torch.float32
    saved: bool = False
    mistake: str = ""


# In CI: packed sequences that TP does not divide; chunks that are not neighbors, with tied embeddings.
SHORT = {
    "tp2_sp_packed_selective": Case(2, tp=2, sequence_parallel=True, packed=True, recompute="selective"),
    "pp2_vpp2_tied": Case(2, pp=2, vpp=2, kind="qwen2_tied", saved=True),
}
LONG = {
    "tp1_packed": Case(1, packed=True),
    "tp2": Case(2, tp=2),
    "tp2_packed": Case(2, tp=2, packed=True),
    "tp2_sp": Case(2, tp=2, sequence_parallel=True),
    "tp2_sp_logits": Case(2, tp=2, sequence_parallel=True, fused=False),
    "tp2_sp_tied_full": Case(2, tp=2, sequence_parallel=True, kind="qwen2_tied", recompute="full", packed=True),
    "pp2": Case(2, pp=2),
    "pp2_packed": Case(2, pp=2, packed=True),
    "pp2_vpp2": Case(2, pp=2, vpp=2),
    "pp2_vpp2_packed_full": Case(2, pp=2, vpp=2, packed=True, recompute="full"),
    "dp2": Case(2),
    "dp2_packed": Case(2, packed=True),
    "full": Case(1, recompute="full"),
    "full_packed": Case(1, recompute="full", packed=True),
    "selective": Case(1, recompute="selective"),
    "selective_packed": Case(1, recompute="selective", packed=True),
    "tp2_pp2": Case(4, tp=2, pp=2),
    "tp2_pp2_sp_packed": Case(4, tp=2, pp=2, sequence_parallel=True, packed=True),
    "tp2_pp2_vpp2_sp_packed_tied": Case(4, tp=2, pp=2, vpp=2, sequence_parallel=True, packed=True, kind="qwen2_tied"),
    "tp2_dp2": Case(4, tp=2),
    "tp2_dp2_sp_packed": Case(4, tp=2, sequence_parallel=True, packed=True),
    "pp2_dp2": Case(4, pp=2),
    "pp2_dp2_vpp2_packed": Case(4, pp=2, vpp=2, packed=True),
    "bf16": Case(1, dtype=torch.bfloat16),
    "bf16_tp2_sp_packed": Case(2, tp=2, sequence_parallel=True, packed=True, dtype=torch.bfloat16),
    "bf16_pp2_vpp2": Case(2, pp=2, vpp=2, dtype=torch.bfloat16),
    "bf16_dp2": Case(2, dtype=torch.bfloat16),
}
MISTAKES = {
    mistake: Case(2, tp=2, packed=True, mistake=mistake)
    for mistake in ("no finalize_model_grads", "loss_index + 1", "mean per micro-batch")
}
CASES = SHORT | LONG | MISTAKES


def _world(rank: int, world_size: int, root: Path, names: list[str], n_steps: int) -> dict[str, dict[str, Any]]:
    """Measure, in a rank, one curve after the other in new Megatron groups."""
    measured = {}
    for name in names:
        measured[name] = _curve(rank, CASES[name], root, n_steps)
        destroy_groups()
    return measured


def _curve(rank: int, case: Case, root: Path, n_steps: int) -> dict[str, Any]:
    from gkd.actor.megatron import layer_spec, pipeline

    student = build_student(
        "megatron",
        root / case.kind,
        rank,
        case.world_size,
        tp=case.tp,
        pp=case.pp,
        vpp=case.vpp,
        dtype=case.dtype,
        fused_lm_head=case.fused,
        recompute=case.recompute,
        sequence_parallel=case.sequence_parallel,
    )
    mine = partial(_mine, case=case, layout=student.layout)
    reference: Reference = torch.load(root / f"{case.kind}.pt", weights_only=False)
    if case.saved:
        student.save_hf(root / f"saved_{case.kind}", root / case.kind)
    with patch.object(layer_spec, "causal_attention", wraps=layer_spec.causal_attention) as counted:
        grads = grads_of(student, mine(0))
    group = case.pp if case.vpp > 1 else 1  # an interleaved pipeline pads the last group
    n_passes = -(-len(mine(0)) // group) * group * N_LAYERS // case.pp  # micro-batches times layers of this rank
    loss_sums = pipeline._loss_sums
    if case.mistake == "no finalize_model_grads":
        student.model.config.finalize_model_grads_func = _reduce_nothing
    elif case.mistake == "mean per micro-batch":
        loss_sums = _mean_per_micro_batch(loss_sums)
    with patch.object(pipeline, "_loss_sums", loss_sums):
        stats = [step_in_parts(student, mine(n)) if n % 2 else student.train_step(mine(n)) for n in range(n_steps)]
    return {
        "grad_diff": max(float((grad.cpu() - reference.grads[name]).abs().max()) for name, grad in grads.items()),
        "grad_names": sorted(grads),
        "attention_calls": counted.call_count / n_passes,
        "losses": [s.loss for s in stats],
        "grad_norms": [s.grad_norm for s in stats],
    }


def _mine(step: int, *, case: Case, layout: Any) -> list[MicroBatch]:
    """Return a DP rank's share of a step's micro-batches."""
    batches = make_micro_batches(step % N_BATCHES)
    if case.packed:
        batches = [packed(batch) for batch in batches]
    if case.mistake == "loss_index + 1":
        for batch in batches:
            batch.loss_index = batch.loss_index + 1
    return share(batches, layout.dp_rank, layout.dp)


def _reduce_nothing(model: Any, num_tokens: Any = None, **_: Any) -> None:
    """Replace finalize_model_grads: each rank keeps its own gradient, with the right divisor."""
    for chunk in model:
        chunk.scale_gradients(1.0 / num_tokens)


def _mean_per_micro_batch(right: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        loss_sum, n_tokens, report = right(*args, **kwargs)
        return loss_sum / n_tokens, torch.ones_like(n_tokens), report

    return wrong


def _run(root: Path, names: list[str], n_steps: int, timeout_s: float) -> dict[str, list[dict[str, Any]]]:
    """Return the measurements of all ranks by case; one spawn per world size."""
    measured: dict[str, list[dict[str, Any]]] = {}
    for size in sorted({CASES[name].world_size for name in names}):
        own = [name for name in names if CASES[name].world_size == size]
        ranks = run_ranks(_world, size, root, own, n_steps, timeout_s=timeout_s)
        measured |= {name: [rank[name] for rank in ranks] for name in own}
    return measured


def _check_float32(root: Path, name: str, ranks: list[dict[str, Any]]) -> None:
    reference: Reference = torch.load(root / f"{CASES[name].kind}.pt", weights_only=False)
    assert max(float(g.abs().max()) for g in reference.grads.values()) > 0.01  # otherwise 1e-5 is not a test
    assert _learned(reference.losses) > 1000 * FLOAT32_BOUND
    assert {key for r in ranks for key in r["grad_names"]} == set(reference.grads)
    for r in ranks:
        print(f"{name}: gradients {r['grad_diff']:.1e}, losses {_max_diff(r['losses'], reference.losses):.1e}")
        assert r["grad_diff"] <= FLOAT32_BOUND, name
        assert _max_diff(r["losses"], reference.losses) <= FLOAT32_BOUND, name
        assert r["attention_calls"] == (1 if CASES[name].recompute == "none" else 2), name
        assert r["grad_norms"] == pytest.approx(reference.grad_norms, abs=1e-4), name


def _learned(losses: list[float]) -> float:
    """Return how much the loss of the last step's batch has decreased."""
    return losses[(len(losses) - 1) % N_BATCHES] - losses[-1]


def _max_diff(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


def test_short_curves(tmp_path: Path) -> None:
    """Fails if packing, sequence parallelism, selective recompute or the interleaved pipeline changes a gradient."""
    kinds = (case.kind for case in SHORT.values())
    save_references(tmp_path, kinds, N_STEPS_SHORT, n_layers=N_LAYERS, n_batches=N_BATCHES)
    for name, ranks in _run(tmp_path, list(SHORT), N_STEPS_SHORT, timeout_s=200.0).items():
        _check_float32(tmp_path, name, ranks)
    saved, original = (load_file(tmp_path / name / "model.safetensors") for name in ("saved_qwen2_tied", "qwen2_tied"))
    assert saved.keys() == original.keys() and all(torch.equal(saved[name], original[name]) for name in saved)


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """Return the folder of the references and the measurements of every case."""
    root = tmp_path_factory.mktemp("curves")
    kinds = (case.kind for case in CASES.values())
    save_references(root, kinds, N_STEPS, n_layers=N_LAYERS, n_batches=N_BATCHES)
    return root, _run(root, list(CASES), N_STEPS, timeout_s=1500.0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in SHORT | LONG if CASES[name].dtype == torch.float32])
def test_curve(curves: Any, name: str) -> None:
    """Fails if a layout trains on other gradients than a single process."""
    root, measured = curves
    _check_float32(root, name, measured[name])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_bfloat16_curves(curves: Any) -> None:
    """Fails if a bfloat16 student in any layout loses the precision of float32 main weights."""
    root, measured = curves
    expected = train_bf16_reference(root / "qwen3", N_STEPS, n_batches=N_BATCHES)
    exact: Reference = torch.load(root / "qwen3.pt", weights_only=False)
    print(f"bfloat16 reference: {_max_diff(expected, exact.losses):.1e} from float32, learned {_learned(expected):.2f}")
    assert _learned(expected) > 100 * BFLOAT16_BOUND  # the bound is small compared with the decrease
    without = train_bf16_reference(root / "qwen3", N_STEPS, n_batches=N_BATCHES, keep_masters=False)
    assert _max_diff(without, expected) > 2 * BFLOAT16_BOUND
    for name in [name for name, case in LONG.items() if case.dtype == torch.bfloat16]:
        for r in measured[name]:
            print(f"{name}: losses {_max_diff(r['losses'], expected):.1e}")
            assert _max_diff(r["losses"], expected) <= BFLOAT16_BOUND, name


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_curves_show_mistakes(curves: Any, mistake: str) -> None:
    """Fails if the bound is too loose: each of these mistakes must exceed it."""
    root, measured = curves
    reference: Reference = torch.load(root / f"{MISTAKES[mistake].kind}.pt", weights_only=False)
    for r in measured[mistake]:
        print(f"{mistake}: losses {_max_diff(r['losses'], reference.losses):.1e}")
        assert _max_diff(r["losses"], reference.losses) > VISIBLE
