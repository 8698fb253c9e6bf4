"""Compare mixtures of experts, and dense models of `CASES`, in the Megatron student with plain HF + AdamW. float32.

What this does not prove: grouped matrix products.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.helpers import run_ranks
from tests.dist.megatron_reference import MOE_KINDS, save_references
from tests.dist.parity_cases import N_STEPS, check, measure, reference_of, share_of
from tests.dist.resume_cases import exported, save
from tests.dist.resume_cases import weights as digests
from tests.dist.student_cases import build_student

WORLD = 2
# name -> (tp, pp, ep, kinds of models), all of two processes
LAYOUTS: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
    "tp2": (2, 1, 1, ("mistral", "smollm3", "ministral3")),
    "pp2": (1, 2, 1, MOE_KINDS[1:2]),
    "dp2": (1, 1, 1, MOE_KINDS[:1]),
    # Megatron requires sequence parallelism for experts with TP.
    "tp2_sp": (2, 1, 1, (*MOE_KINDS[1:4], "olmo2", "gemma3_text")),
    "ep2": (1, 1, 2, MOE_KINDS),
}
# name -> (tp, pp, ep, processes), not run in CI. In the last one, TP peers belong to different EP groups.
LARGER_LAYOUTS: dict[str, tuple[int, int, int, int]] = {
    "tp2_dp2_ep2": (2, 1, 2, 4),
    "pp2_dp2_ep2": (1, 2, 2, 4),
    "tp2_dp3_ep3": (2, 1, 3, 6),
}
RESUMED = ("qwen3_moe_mixed", "glm4_moe", "olmo2")
CASES = [(layout, kind) for layout, spec in LAYOUTS.items() for kind in spec[-1]]
pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one HF model and one reference run per kind."""
    return save_references(tmp_path_factory.mktemp("moe"), (kind for _, kind in CASES), N_STEPS)


@pytest.fixture(scope="module")
def results(references: Path) -> list[dict[Any, dict[str, Any]]]:
    """Return, per rank, the measurements by (layout, kind) and those of `_resume`. One spawn."""
    return run_ranks(_measure_all, WORLD, references, timeout_s=200.0)


def _measure_all(rank: int, world_size: int, root: Path) -> dict[Any, dict[str, Any]]:
    """Measure all cases in a rank."""
    measured: dict[Any, dict[str, Any]] = {case: _measure(rank, world_size, root, *case) for case in CASES}
    measured["resume"] = _resume(rank, world_size, root / RESUMED[0])
    return measured


def _student(rank: int, folder: Path, name: str, *, world_size: int = WORLD, **options: Any) -> Any:
    """Build a student in layout `name`; replaces the Megatron groups of the previous one."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    tp, pp, ep, _ = (LAYOUTS | LARGER_LAYOUTS)[name]
    options.setdefault("sequence_parallel", tp > 1 and name != "tp2")
    return build_student("megatron", folder, rank, world_size, tp=tp, pp=pp, ep=ep, **options)


def _measure(rank: int, world_size: int, root: Path, name: str, kind: str) -> dict[str, Any]:
    return measure(_student(rank, root / kind, name, world_size=world_size), root / kind)


def _resume(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Save and load checkpoints and a HF folder on two ranks; also recompute and bfloat16."""
    result: dict[str, Any] = {}
    names = ("ep2", "dp2", "pp2", "tp2_sp")[folder.name not in MOE_KINDS :]
    student = _student(rank, folder, names[0])
    student.save_hf(folder / "saved", folder)
    for step in range(2):
        student.train_step(share_of(student.layout, step))
    save(student, folder / "checkpoint")
    dist.barrier()  # before the files of the other ranks are read
    untrained = {name: own for name, own in digests(student).items() if name.endswith("correction_bias")}
    assert digests(student).items() - untrained.items() <= exported(folder / "checkpoint", folder).items()
    expected = student.train_step(share_of(student.layout, 2))
    for name in names:
        resumed = _student(rank, folder, name, recompute="full")
        resumed.load_checkpoint(folder / "checkpoint")
        got = resumed.train_step(share_of(resumed.layout, 2))
        result["same" if name == names[0] else name] = (
            abs(got.loss - expected.loss),
            abs(got.grad_norm - expected.grad_norm),
        )
    bf16 = _student(rank, folder, names[0], dtype=torch.bfloat16)
    result["bf16_losses"] = [bf16.train_step(share_of(bf16.layout, step)).loss for step in range(3)]
    return result


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_experts_train_as_in_plain_hugging_face(results: Any, references: Path, layout: str, kind: str) -> None:
    """Fails if tokens are routed to other experts than in HF, or an expert is on the wrong rank or not exported; if an
    expert's or the router's gradient is reduced over the wrong ranks, or scaled twice; or if the clipping norm omits
    experts, or their optimizer differs from plain AdamW.
    """
    check([rank[layout, kind] for rank in results], references / kind)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LARGER_LAYOUTS)
def test_larger_layouts(references: Path, layout: str) -> None:
    """Fails if experts with TP, PP and DP train differently, or ranks run different numbers of micro-batches."""
    kind = "qwen3_moe_mixed"
    ranks = run_ranks(_measure, LARGER_LAYOUTS[layout][-1], references, layout, kind, timeout_s=250.0)
    check(ranks, references / kind)


@pytest.mark.parametrize("kind", [RESUMED[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in RESUMED[1:])])
def test_checkpoints_and_folders(results: Any, references: Path, kind: str) -> None:
    """Fails if a checkpoint (resharded or not) or a saved folder drops or swaps experts or their optimizer state."""
    from safetensors.torch import load_file

    is_first = kind == RESUMED[0]
    ranks = [rank["resume"] for rank in results] if is_first else run_ranks(_resume, WORLD, references / kind)
    for resumed in ranks:
        losses = resumed.pop("bf16_losses")
        assert resumed.pop("same") == (0.0, 0.0)  # recomputation is bit-exact
        assert max(max(differences) for differences in resumed.values()) <= 1e-5
        assert losses == pytest.approx(reference_of(references / kind).losses[:3], rel=0.02)
    folder = references / kind
    saved, original = (load_file(each / "model.safetensors") for each in (folder / "saved", folder))
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in original)
