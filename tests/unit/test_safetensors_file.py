"""Test the incremental safetensors writer by reading files with the safetensors package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from gkd.actor.common.hf_folder import write_safetensors


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn((3, 5), generator=generator),
        "odd": torch.randn(7, generator=generator).bfloat16(),
        "half": torch.randn((2, 3), generator=generator).half(),
        "turned": torch.randn((4, 6), generator=generator).T,
        "part": torch.randn((4, 6), generator=generator)[1:3, ::2],
        "empty": torch.zeros((0, 4)),
        "number": torch.tensor(2.5),
    }


def _plan(tensors: dict[str, Tensor]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def test_the_file_holds_the_tensors(tmp_path: Path) -> None:
    """Fails if offsets, dtypes, shapes or the layout of a strided tensor are written wrongly."""
    tensors = _tensors()
    write_safetensors(tmp_path / "x.safetensors", _plan(tensors), iter(tensors.items()))
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(read[name].dtype == t.dtype and torch.equal(read[name], t) for name, t in tensors.items())
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers requires it


def test_the_stream_is_read_only_as_planned(tmp_path: Path) -> None:
    """Fails if a file consumes the first tensor of the next one, or reads all tensors before writing one."""
    tensors = _tensors()
    taken: list[str] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            taken.append(name)
            yield name, tensor

    source, plan = stream(), _plan(tensors)
    write_safetensors(tmp_path / "1.safetensors", plan[:2], source)
    assert taken == ["a.weight", "odd"]
    write_safetensors(tmp_path / "2.safetensors", plan[2:], source)
    assert torch.equal(load_file(tmp_path / "2.safetensors")["half"], tensors["half"])


@pytest.mark.parametrize("kind", ["order", "short", "dtype", "shape"])
def test_a_stream_that_leaves_the_plan_is_refused(tmp_path: Path, kind: str) -> None:
    """Fails if tensors with other names, shapes or dtypes than planned are written."""
    tensors = {"a": torch.zeros(2, 3), "b": torch.ones(2, 3)}
    given = {
        "order": {"b": tensors["b"], "a": tensors["a"]},
        "short": {"a": tensors["a"]},
        "dtype": {"a": tensors["a"], "b": torch.zeros(2, 3, dtype=torch.float16)},
        "shape": {"a": tensors["a"], "b": torch.zeros(3, 2)},
    }[kind]
    with pytest.raises(RuntimeError, match=r"\('b', \("):
        write_safetensors(tmp_path / "x.safetensors", _plan(tensors), iter(given.items()))
