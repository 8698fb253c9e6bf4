"""Test the Triton kernels without a GPU: their arithmetic in the interpreter, and the compiled machine code.

The checks run in two processes of their own, see `triton_rows_cases`. On a GPU: tests/gpu/test_loss_cuda.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def problems(mode: str, environment: dict[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.triton_rows_cases", mode]
    child = subprocess.run(command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=200)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return problems("interpreted", {"TRITON_INTERPRET": "1"})


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return problems("compiled", {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))})


@pytest.mark.parametrize(
    "check",
    [
        "statistics_equal_float64",
        "statistics_of_impossible_tokens",
        "a_nan_or_infinity_stays",
        "strided_rows",
        "rows_beyond_32_bits",
        "rounded_once",
        "no_rows",
        "refusals",
    ],
)
def test_arithmetic(interpreted: dict[str, str], check: str) -> None:
    """Fails if the kernels compute something else than float64 does; each check has a docstring."""
    assert not interpreted[check], interpreted[check]


def test_gradient_equals_float64(interpreted: dict[str, str]) -> None:
    """Fails if repeated ids are not summed, an id at a boundary or -1 is misplaced, or T is ignored."""
    assert not interpreted["gradient_equals_float64"], interpreted["gradient_equals_float64"]


@pytest.mark.parametrize("check", ["cpu_tensors_are_refused", "kernels_compile_for_hopper"])
def test_compiled(compiled: dict[str, str], check: str) -> None:
    """Fails if the kernels do not compile for a GPU as intended; each check has a docstring."""
    assert not compiled[check], compiled[check]
