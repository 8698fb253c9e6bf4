"""Test the memory of a frozen model's weights on a CUDA device. Not run in CI: pytest -m gpu tests/gpu

One rank. Scores, refreshes and checkpoints: tests/dist with --device cuda. Not proven: how fast the copies are.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gkd.actor.common.shard_writer import write
from gkd.actor.fsdp import model as fsdp_model
from teacher_server.engines.base import ScoreParams
from tests.device import VARIABLE, environment
from tests.dist.frozen_cases import PLAIN, build, sequences
from tests.dist.helpers import group_of_one
from tests.dist.megatron_reference import make_hf_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """Join a group with NCCL only, as the actor's ranks do, so host tensors cannot be communicated."""
    with environment({VARIABLE: "cuda"}), group_of_one():
        yield


def shards_of(model: Any) -> list[torch.Tensor]:
    return [param.to_local() for param in model.model.parameters()]


def pinned_by_torch() -> int:
    """Return the bytes of torch's pinned-memory allocator, including rounding and cache."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", ["qwen3", "qwen2_tied"])
@pytest.mark.parametrize("float32_weights", [False, True])
@pytest.mark.parametrize("cpu_offload", [True, False])
def test_weights_stay_where_the_setting_says(
    tmp_path: Path, kind: str, float32_weights: bool, cpu_offload: bool
) -> None:
    """Fails if a refresh or a load leaves weights on the GPU or in pageable memory, a call leaks memory, or pinned
    memory exceeds the shards.
    """
    folder = make_hf_folder(tmp_path / "model", kind)
    before, runs = pinned_by_torch(), len(fsdp_model._PINNED)
    model = build(folder, device=CUDA, dtype=torch.bfloat16, float32_weights=float32_weights, cpu_offload=cpu_offload)

    def at_home() -> bool:
        if cpu_offload:
            return all(shard.device.type == "cpu" and shard.is_pinned() for shard in shards_of(model))
        return all(shard.device == CUDA for shard in shards_of(model))

    def allocated() -> int:
        gc.collect()  # building a model leaves tensors in reference cycles, which are freed at any later time
        return torch.cuda.memory_allocated()

    model.score(sequences(), PLAIN)
    held = allocated()
    assert at_home()
    for ema in (0.0, 0.9):
        given = ((name, tensor.cuda()) for name, tensor in load_file(folder / "model.safetensors").items())
        model.refresh(given, ema)
        assert at_home()
    kept = [shard.cpu().clone() for shard in shards_of(model)]
    snapshot = model.snapshot()
    model.refresh((name, 2 * tensor.cuda()) for name, tensor in load_file(folder / "model.safetensors").items())
    write(tmp_path / "checkpoint", 0, replace(snapshot, meta={**snapshot.meta, "step": 1, "world_size": 1}))
    snapshot.release()
    model.load(tmp_path / "checkpoint")
    assert at_home() and all(torch.equal(a, b.cpu()) for a, b in zip(kept, shards_of(model), strict=True))
    model.score(sequences(), PLAIN)
    assert at_home() and allocated() == held
    assert len(fsdp_model._PINNED) - runs == int(cpu_offload)
    if cpu_offload:
        sizes = [shard.nbytes for shard in shards_of(model)]
        assert sum(sizes) <= fsdp_model._PINNED[-1].nbytes <= sum(sizes) + 64 * len(sizes)
        assert pinned_by_torch() - before < max(sizes), "torch has pinned shards once more, each on its own"


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("float32_weights", [False, True])
def test_layers_that_are_copied_ahead_are_those_of_this_pass(tmp_path: Path, float32_weights: bool) -> None:
    """Fails if a layer computes with another layer's weights, before they have arrived, or with those that a broken
    pass has copied before a refresh.
    """
    folder = make_hf_folder(tmp_path / "model", "qwen3")
    hosted, resident = (
        build(folder, device=CUDA, dtype=torch.bfloat16, float32_weights=float32_weights, cpu_offload=offload)
        for offload in (True, False)
    )

    def logits(model: Any) -> np.ndarray:
        return np.concatenate([table for (table,) in model.score(sequences(), (ScoreParams("logits"),))])

    before = logits(resident)
    assert np.array_equal(logits(hosted), before) and np.array_equal(logits(hosted), before)
    layers = fsdp_model.layer_list(hosted.model.hf)
    broken = layers[-2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(hosted)
    broken.remove()
    for model in (hosted, resident):
        model.refresh((name, 2 * tensor.cuda()) for name, tensor in load_file(folder / "model.safetensors").items())
    after = logits(resident)
    assert np.array_equal(logits(hosted), after) and not np.array_equal(before, after)
