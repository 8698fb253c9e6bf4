"""Compare predictions with the blocks of torch's CUDA allocator, as `tests.bench.footprint_allocator` measured them.

The allocator was executed on stand-in cards, whose kernels do nothing; its bytes depend on sizes alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.footprint_allocator import CASES
from tests.bench.footprint_peak import LOSS, SAVED, STATES, WORKSPACES, PeakCase, at_peak, predict

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "footprint_cuda_allocator.json"
IN_LOSS = [case for case in CASES["megatron"] if not case.name.startswith("small")]  # the loss is the peak


def _measured(part: str, case: PeakCase) -> dict[str, int]:
    (table,) = json.loads(MEASURED.read_text())["parts"][part]["tables"]
    (row,) = (row for row in table["rows"] if row[0] == case.name)
    return dict(zip(table["columns"], row, strict=True))


@pytest.mark.parametrize("case", CASES["megatron"], ids=lambda case: case.name)
def test_the_peak_of_a_megatron_rank(case: PeakCase, tmp_path: Path) -> None:
    """Fails if the prediction on CUDA forgets a tensor of some percent of the peak, or counts one that is not there."""
    _, peak = predict(case, tmp_path)
    assert 0.98 < peak / _measured("megatron", case)["peak"] < 1.06


@pytest.mark.parametrize("case", IN_LOSS, ids=lambda case: case.name)
def test_the_items_of_a_megatron_rank(case: PeakCase, tmp_path: Path) -> None:
    """Fails if a wrong term of the prediction is hidden by another one, for example saved activations by the loss."""
    parts, _ = predict(case, tmp_path)
    found = _measured("megatron", case)
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert states / found[STATES] == pytest.approx(1.0, abs=0.01)
    assert 0.97 < parts["activations"] / found[SAVED] < 1.03
    # The prediction has 32 MiB for kernels that are not Triton's.
    assert 0.97 * found[LOSS] < parts["logits"] + parts["transient"] < 1.05 * found[LOSS] + (32 << 20)


@pytest.mark.parametrize("case", CASES["fsdp2"], ids=lambda case: case.name)
def test_the_peak_of_an_fsdp2_rank(case: PeakCase, tmp_path: Path) -> None:
    """Fails if a gathered layer, a gradient or activations are forgotten on CUDA. Of a step of one micro-batch, whose
    gradients do not exist during its loss, more is predicted by up to their size.
    """
    parts, peak = predict(case, tmp_path)
    measured = _measured("fsdp2", case)
    found = measured["peak"] - measured[WORKSPACES]  # they are part of what is counted as context
    spare = parts["gradients"] if case.n_batches == 1 else 0
    assert 0.98 * found < peak < 1.06 * found + spare


def test_the_fullest_moment() -> None:
    """Fails if the replay of the allocator's history counts freed blocks, or takes another moment than the fullest."""

    def entry(action: str, addr: int, size: int, *names: str) -> dict[str, Any]:
        return {"action": action, "addr": addr, "size": size, "frames": [{"name": n, "filename": ""} for n in names]}

    found = at_peak(
        [
            entry("alloc", 1, 100, "mm", "train_step"),
            entry("free_requested", 1, 100),
            entry("alloc", 1, 10, "step", "_update", "train_step"),
            entry("alloc", 2, 50, "forward", "train_step"),
            entry("alloc", 3, 60, "backward"),
            entry("free_requested", 2, 50),
            entry("alloc", 4, 20, "forward", "train_step"),
            entry("free_requested", 4, 20),
            entry("free_requested", 3, 60),
        ]
    )
    assert found == {"states": 10, "saved": 50, "passing": 60}
