"""Page-locked host memory that runs out, of which CUDA speaks as of the GPU's. In torch's words: no GPU here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gkd.actor.common.host_copies import HostCopies
from gkd.actor.common.shards import Piece
from gkd.actor.fsdp import host_block
from gkd.errors import OutOfMemory
from gkd.memory.advice import Shortage
from gkd.memory.host_buffer import HostBuffer, host_slabs
from gkd.memory.oom import diagnosed, is_out_of_memory, parse
from gkd.memory.states import PARAMS, States

CPU = torch.device("cpu")
SAID = (
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
    "group__CUDART__TYPES.html for more information.\nCUDA kernel errors might be asynchronously reported at some "
    "other API call, so the stacktrace below might be incorrect."
)


@pytest.fixture
def one_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece of pinned memory can be had, and no second one."""
    given, real = [], torch.empty

    def empty(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory and given:
            raise torch.AcceleratorError(SAID)
        given.extend([pin_memory] * pin_memory)
        return real(*args, **options)

    monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.usefixtures("one_slab")
def test_the_error_has_the_requested_bytes() -> None:
    """Fails if the error does not state how much host memory was needed, and of which kind."""
    with pytest.raises(MemoryError, match=r"300 bytes of pinned host memory \(3 pieces of 100"):
        host_slabs(3, 100, pinned=True)
    copies = HostCopies(CPU, slab_bytes=64)
    copies._stream = object()  # type: ignore[assignment]
    with pytest.raises(MemoryError, match="Unable to allocate 448 bytes of pinned host memory"):
        copies.snapshot([Piece("w", "param", 0, 0, torch.ones(100))], {}, {})


def test_a_run_of_shards_that_cannot_be_pinned_is_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if CUDA's text for it is taken for an unknown error, so that the largest shortage has no diagnosis."""

    def refuse(address: int, n_bytes: int) -> None:
        raise RuntimeError("Registering memory failed with cudaError: 2. It's possible that this is asynchronous")

    monkeypatch.setattr(host_block, "pin_memory", refuse)
    with pytest.raises(MemoryError, match="Unable to allocate 512 bytes of pinned host memory") as raised:
        host_block._pin(torch.empty(512, dtype=torch.uint8))
    assert is_out_of_memory(raised.value) and parse(str(raised.value)).requested == 512


@pytest.mark.usefixtures("one_slab")
def test_it_is_the_host_that_is_short(tmp_path: Path) -> None:
    """Fails if the advice is to make room on a GPU that has it, or states without room on the host are lost."""
    first, weights = torch.ones(16), torch.arange(1000.0)
    states = States(CPU, lambda: {PARAMS: [first, weights]})
    states._kinds[PARAMS].buffer = buffer = HostBuffer(pinned=True, slab_bytes=64)
    told: list[Shortage] = []

    def keys(shortage: Shortage) -> list[str]:
        told.append(shortage)
        return ["a.key=1: lower it"]

    with (
        pytest.raises(OutOfMemory) as raised,
        diagnosed(tmp_path, device=torch.device("cuda", 0), who="actor rank 0", phase="offloading states", advice=keys),
    ):
        states.offload_states()
    assert str(raised.value).startswith("actor rank 0 ran out of memory of the host (pinned) (offloading states): ")
    assert "GiB failed" in str(raised.value) and not told[0].on_cuda
    assert torch.equal(weights, torch.arange(1000.0)) and buffer.mark == 0 and not states.away()


def test_other_errors_of_the_device_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a broken kernel, which torch tells at the next call, is called a lack of memory."""

    def broken(*args: Any, **options: Any) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "empty", broken)
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        host_slabs(1, 100, pinned=True)
