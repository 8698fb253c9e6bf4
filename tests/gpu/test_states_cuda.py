"""Test offload and reload between a GPU and pinned host memory. Needs one GPU with 6 GiB free.

Students that train the same: tests/dist/test_offload_layouts.py with --device cuda.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from gkd.actor.offload import OffloadController
from gkd.memory.host_buffer import HostBuffer
from gkd.memory.states import GRADS, OPTIMIZER, PARAMS, States

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
N = 1 << 28  # bytes of each tensor


def tensors() -> dict[str, list[torch.Tensor]]:
    torch.manual_seed(0)
    values = {kind: [torch.randn(N // 4, device=CUDA) for _ in range(2)] for kind in (PARAMS, OPTIMIZER)}
    return values | {GRADS: [torch.randn(N // 4, device=CUDA)]}


def test_all_of_it_goes_and_comes_back_to_the_byte() -> None:
    """Fails if a copy races with the kernels before or after it, or memory stays allocated or grows with cycles."""
    found = tensors()
    sums = [tensor.double().sum() for kind in (PARAMS, OPTIMIZER) for tensor in found[kind]]
    states = States(CUDA, lambda: found)
    held = torch.cuda.memory_allocated(CUDA)
    for _ in range(200):
        found[PARAMS][0].add_(1.0)  # a kernel that is still running when the copy is issued
        states.offload_states()
        assert torch.cuda.memory_allocated(CUDA) < held - 5 * N + (1 << 20)
        states.reload_states()
        found[PARAMS][0].sub_(1.0)
        assert torch.cuda.memory_allocated(CUDA) == held
    again = [tensor.double().sum() for kind in (PARAMS, OPTIMIZER) for tensor in found[kind]]
    assert all(torch.allclose(a, b) for a, b in zip(sums[:1], again[:1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(sums[1:], again[1:], strict=True))
    assert not found[GRADS][0].any()


def test_no_memory_on_the_gpu_leaves_all_on_the_host(tmp_path: Path) -> None:
    """Fails if a reload that runs out of memory loses states, or keeps GPU memory."""
    found = tensors()
    sums = [tensor.double().sum().item() for tensor in found[PARAMS]]
    states = States(CUDA, lambda: found)
    states.offload_states()
    torch.cuda.empty_cache()
    # A limit of this process, because others may use the GPU.
    allowed = torch.cuda.memory_reserved(CUDA) + 2 * N
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info(CUDA)[1], CUDA)
    with pytest.raises(torch.OutOfMemoryError):
        states.reload_states()
    assert states.allocated_bytes() == 0
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(CUDA)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        student = cast(Any, SimpleNamespace(states=states))
        with pytest.raises(torch.OutOfMemoryError):
            OffloadController(student, CUDA, automatic=True, timeout_s=60).reload_states()
    finally:
        dist.destroy_process_group()
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
    assert torch.cuda.memory_reserved(CUDA) == reserved
    states.reload_states()
    assert [tensor.double().sum().item() for tensor in found[PARAMS]] == sums


def test_pinned_memory_that_runs_out_is_the_hosts() -> None:
    """Fails if an out-of-memory error of pinned memory is not recognized, or CUDA does not recover from it."""
    with pytest.raises(MemoryError, match=str(1 << 46)):
        HostBuffer(pinned=True, slab_bytes=1 << 46).take(1)
    assert HostBuffer(pinned=True, slab_bytes=1 << 20).take(1)[0].is_pinned()
