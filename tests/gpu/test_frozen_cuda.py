"""Where a frozen model's weights live on a CUDA device. Run by hand where there is one: pytest -m gpu tests/gpu

One rank. What this does not prove: several ranks over NCCL, and how fast the copies are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.dist.frozen_cases import PLAIN, build, sequences
from tests.dist.helpers import free_port
from tests.dist.megatron_reference import make_hf_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    torch.cuda.set_device(0)
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("float32_weights", [False, True])
def test_weights_are_pinned_in_host_memory_before_and_after_a_refresh(tmp_path: Path, float32_weights: bool) -> None:
    """Fails if a refresh leaves weights on the GPU, or in memory that copies wait for; or if a call keeps memory."""
    folder = make_hf_folder(tmp_path / "model", "qwen3")
    settings = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16, "float32_weights": float32_weights}
    model = build(folder, **settings)

    def at_home() -> bool:
        shards = [param.to_local() for param in model.model.parameters()]  # type: ignore[attr-defined]
        return all(shard.device.type == "cpu" and shard.is_pinned() for shard in shards)

    first = model.score(sequences(), PLAIN)
    held = torch.cuda.memory_allocated()
    assert at_home()
    for ema in (0.0, 0.9):
        given = ((name, tensor.cuda()) for name, tensor in load_file(folder / "model.safetensors").items())
        model.refresh(given, ema)
        assert at_home()
    again = model.score(sequences(), PLAIN)
    assert at_home() and torch.cuda.memory_allocated() == held
    for a, b in zip(first, again, strict=True):  # the same weights as before
        np.testing.assert_allclose(a[0], b[0], atol=0.1)
