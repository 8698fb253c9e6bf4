"""Compare the Megatron student with plain HF + AdamW for every kind of parallelism. float32.

What this does not prove: bfloat16 rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.helpers import run_ranks
from tests.dist.megatron_reference import KINDS, save_references
from tests.dist.parity_cases import N_STEPS, check, measure
from tests.dist.student_cases import build_student

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
    return save_references(tmp_path_factory.mktemp("parity"), KINDS, N_STEPS)


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

    measured: dict[str, dict[str, Any]] = {}
    for name in names:
        _, tp, pp = LAYOUTS[name]
        measured[name] = {}
        for kind in kinds_of(name):
            recompute = "full" if kind in ("qwen3", "ministral3", "gemma3_text") else "none"
            student = build_student("megatron", root / kind, rank, world_size, tp=tp, pp=pp, recompute=recompute)
            measured[name][kind] = measure(student, root / kind)
        parallel_state.destroy_model_parallel()
    return measured


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, name, marks=pytest.mark.slow if size > 2 else ())
        for name, (size, *_) in LAYOUTS.items()
        for kind in kinds_of(name)
    ],
)
def test_a_layout_trains_as_plain_hugging_face(results: Any, references: Path, layout: str, kind: str) -> None:
    """Fails if import maps a tensor wrongly, export is not its inverse, or a stage exports names of another; if loss
    scaling, a TP/PP/DP reduction, recompute or the gradient of the loss is wrong; or if AdamW, weight-decay groups,
    clipping, or the reported statistics differ from plain training.
    """
    check([rank[kind] for rank in results(layout)], references / kind)
