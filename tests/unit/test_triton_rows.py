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
    found: dict[str, str] = json.loads(child.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return problems("interpreted", {"TRITON_INTERPRET": "1"})


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return problems("compiled", {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))})


def test_statistics_equal_float64(interpreted: dict[str, str]) -> None:
    """Fails if an iteration, a lane or the last columns are skipped, or the running maximum is wrong."""
    assert not interpreted["statistics_equal_float64"], interpreted["statistics_equal_float64"]


def test_statistics_of_impossible_tokens(interpreted: dict[str, str]) -> None:
    """Fails if logits of -inf, also in whole iterations at the start, make the mean or the maximum NaN."""
    assert not interpreted["statistics_of_impossible_tokens"], interpreted["statistics_of_impossible_tokens"]


def test_a_nan_or_infinity_stays(interpreted: dict[str, str]) -> None:
    """Fails if a maximum drops a NaN, so that training continues on broken logits, or a gradient's NaN is lost."""
    assert not interpreted["a_nan_or_infinity_stays"], interpreted["a_nan_or_infinity_stays"]


def test_strided_rows(interpreted: dict[str, str]) -> None:
    """Fails if the padded columns of a wider matrix are read or written, or a transposed table is misread."""
    assert not interpreted["strided_rows"], interpreted["strided_rows"]


def test_rows_beyond_32_bits(interpreted: dict[str, str]) -> None:
    """Fails if row offsets are 32-bit: 8192 rows of 300,000 columns have more than 2^31 elements."""
    assert not interpreted["rows_beyond_32_bits"], interpreted["rows_beyond_32_bits"]


def test_gradient_equals_float64(interpreted: dict[str, str]) -> None:
    """Fails if repeated ids are not summed, an id at a boundary or -1 is misplaced, or T is ignored."""
    assert not interpreted["gradient_equals_float64"], interpreted["gradient_equals_float64"]


def test_gradient_is_rounded_once(interpreted: dict[str, str]) -> None:
    """Fails if the value at an id is summed in bfloat16, where target and share cancel completely."""
    assert not interpreted["rounded_once"], interpreted["rounded_once"]


def test_no_rows(interpreted: dict[str, str]) -> None:
    """Fails if a micro-batch without loss rows launches a grid of zero programs, which CUDA refuses."""
    assert not interpreted["no_rows"], interpreted["no_rows"]


def test_refusals(interpreted: dict[str, str]) -> None:
    """Fails if float64 is silently computed in float32, or a transposed matrix is read along the wrong axis."""
    assert not interpreted["refusals"], interpreted["refusals"]


def test_cpu_tensors_are_refused(compiled: dict[str, str]) -> None:
    """Fails if a student on the CPU gets a driver error instead of one that names the setting."""
    assert not compiled["cpu_tensors_are_refused"], compiled["cpu_tensors_are_refused"]


def test_kernels_compile_for_hopper(compiled: dict[str, str]) -> None:
    """Fails if the kernels do not compile, lack the barriers at the loop, or load less than 16 bytes at once."""
    assert not compiled["kernels_compile_for_hopper"], compiled["kernels_compile_for_hopper"]
