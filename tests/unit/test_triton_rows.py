"""The Triton kernels without a GPU: their arithmetic in the interpreter, and the machine code they compile to.

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
    """Would break if a turn, a lane or the last columns were left out, or the running maximum were wrong."""
    assert not interpreted["statistics_equal_float64"], interpreted["statistics_equal_float64"]


def test_statistics_of_impossible_tokens(interpreted: dict[str, str]) -> None:
    """Would break if logits of -inf, whole turns of them at the start too, made a NaN of the mean or the maximum."""
    assert not interpreted["statistics_of_impossible_tokens"], interpreted["statistics_of_impossible_tokens"]


def test_a_nan_or_infinity_stays(interpreted: dict[str, str]) -> None:
    """Would break if a maximum swallowed a NaN, so that broken logits trained on, or a gradient's NaN were lost."""
    assert not interpreted["a_nan_or_infinity_stays"], interpreted["a_nan_or_infinity_stays"]


def test_strided_rows(interpreted: dict[str, str]) -> None:
    """Would break if the padded columns of a wider matrix were read or written, or a transposed table misread."""
    assert not interpreted["strided_rows"], interpreted["strided_rows"]


def test_rows_beyond_32_bits(interpreted: dict[str, str]) -> None:
    """Would break if the place of a row were a 32-bit number: 8192 rows of 300,000 columns have more than 2^31."""
    assert not interpreted["rows_beyond_32_bits"], interpreted["rows_beyond_32_bits"]


def test_gradient_equals_float64(interpreted: dict[str, str]) -> None:
    """Would break if repeats of an id did not add up, an id at a border or -1 were misplaced, or T forgotten."""
    assert not interpreted["gradient_equals_float64"], interpreted["gradient_equals_float64"]


def test_gradient_is_rounded_once(interpreted: dict[str, str]) -> None:
    """Would break if the value at an id were summed in bfloat16, where target and share cancel to nothing."""
    assert not interpreted["rounded_once"], interpreted["rounded_once"]


def test_no_rows(interpreted: dict[str, str]) -> None:
    """Would break if a micro-batch without loss rows started a grid of zero programs, which CUDA refuses."""
    assert not interpreted["no_rows"], interpreted["no_rows"]


def test_refusals(interpreted: dict[str, str]) -> None:
    """Would break if float64 were silently computed in float32, or a transposed matrix read along the wrong axis."""
    assert not interpreted["refusals"], interpreted["refusals"]


def test_cpu_tensors_are_refused(compiled: dict[str, str]) -> None:
    """Would break if a student on the CPU got an error of the driver instead of one that names the setting."""
    assert not compiled["cpu_tensors_are_refused"], compiled["cpu_tensors_are_refused"]


def test_kernels_compile_for_hopper(compiled: dict[str, str]) -> None:
    """Would break if the kernels did not compile, lost the barriers at the loop, or read less than 16 bytes at once."""
    assert not compiled["kernels_compile_for_hopper"], compiled["kernels_compile_for_hopper"]
