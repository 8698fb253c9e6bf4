"""Compare what the system does with tiny models of each family with docs/models.md."""

from __future__ import annotations

import json
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests import model_parts as parts
from tests.model_families import families
from tests.pages import tables, with_tables
from tests.structure import ROOT

# One for each mechanism. The others are slow.
IN_CI = {
    "gemma3_text": "windows",
    "gemma2": "capped scores and logits",
    "gpt_oss": "sinks; experts in one tensor, with biases",
    "qwen3_5_text": "gated delta nets, in bfloat16 in vLLM",
    "granitemoehybrid": "Mamba",
    "deepseek_v3": "latent attention; groups of experts",
    "mixtral": "experts with other names",
    "qwen3_moe": "experts, also of megatron",
    "lfm2": "convolutions",
    "granite": "scaled logits",
    "phi3": "fused projections",
    "smollm3": "layers without positions",
    "qwen3_vl": "a folder of a model that reads images",
}
RESULTS = {row["family"]: row for row in json.loads((ROOT / "docs/results/models.json").read_text())["families"]}


def _outcomes(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a row without the size of errors."""
    return {part: re.sub(r" \d\S*", "", cell) for part, cell in row.items() if part not in ("family", "why")}


@pytest.mark.dist
@pytest.mark.cpu_only("the kernels that vLLM lacks are those of a CPU")
@pytest.mark.parametrize(
    "name", [*IN_CI, *(pytest.param(n, marks=pytest.mark.slow) for n in families() if n not in IN_CI)]
)
def test_a_family_has_the_outcomes_of_the_page(name: str) -> None:
    """Fails if a part computes another model, refuses one that it took, or takes one that it cannot compute.

    After an improvement, too: run python -m tests.models --json docs/results/models.json, and python -m tests.pages.
    """
    from tests.models import measure

    row = measure(name)
    assert _outcomes(row) == _outcomes(RESULTS[name]), row["why"]


@pytest.mark.dist
def test_a_student_adds_residuals_in_float32(tmp_path: Path) -> None:
    """Fails if a model of which transformers keeps the residuals in float32 cannot be trained in bfloat16."""
    parts.make(tmp_path, "mamba2")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # it joins a process group
        outcome = pool.submit(parts.student_in_16_bits, tmp_path).result()
    assert outcome.kind == "ok", outcome


def test_the_page_has_the_measured_families() -> None:
    """Fails if docs/models.md differs from its figures, or a family has none."""
    page = (ROOT / "docs" / "models.md").read_text()
    assert page == with_tables(page, tables()["models.md"])
    assert list(RESULTS) == list(families())
