"""Page-locked host memory that runs out, of which CUDA speaks as of the GPU's. In torch's words: no GPU here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gkd.actor.common.host_copies import HostCopies
from gkd.actor.common.shards import Piece
from gkd.errors import OutOfMemory
from gkd.memory import host_buffer
from gkd.memory.host_buffer import HostBuffer
from gkd.memory.oom import diagnosed, is_out_of_memory
from gkd.memory.states import PARAMS, States
from gkd.spans import Phase
from gkd.weight_sync.buckets import Bucket, TensorSpec
from gkd.weight_sync.segment import KeptVersion, Segment

CPU = torch.device("cpu")
SAID = (
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
    "group__CUDART__TYPES.html for more information.\nCUDA kernel errors might be asynchronously reported at some "
    "other API call, so the stacktrace below might be incorrect."
)


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> list[torch.AcceleratorError | None]:
    """Return the outcomes of the next pieces of pinned memory; at first one can be had, and no second one."""
    outcomes: list[torch.AcceleratorError | None] = [None, torch.AcceleratorError(SAID)]
    real = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        error = outcomes.pop(0) if pin_memory else None
        if error is not None:
            outcomes.append(error)
            raise error
        return real(*args, **options)

    monkeypatch.setattr(torch, "empty", empty)
    return outcomes


@pytest.mark.usefixtures("pinning")
def test_the_error_has_the_requested_bytes() -> None:
    """Fails if the error does not state how much host memory was needed, and of which kind."""
    with pytest.raises(MemoryError, match=r"384 bytes of pinned host memory \(3 pieces of 128"):
        HostBuffer(pinned=True, slab_bytes=128).take(300)
    copies = HostCopies(CPU, slab_bytes=64)
    copies._stream = object()  # type: ignore[assignment]
    with pytest.raises(MemoryError, match="Unable to allocate 448 bytes of pinned host memory"):
        copies.snapshot([Piece("w", "param", 0, 0, torch.ones(100))], {}, {})


class Cudart:
    """CUDA's registration of host memory. `code` is what it returns."""

    def __init__(self) -> None:
        self.code, self.calls, self.n_cleared = 0, 0, 0
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        assert _is_mapped(address)
        self.calls += 1
        if not self.code:
            self.registered[address] = n_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert _is_mapped(address), "the memory was unmapped while CUDA had it pinned"
        del self.registered[address]
        return 0


def _is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    made, ones = Cudart(), torch.ones

    def kernel(*args: Any, **options: Any) -> torch.Tensor:
        if options.get("device") != "cuda":
            return ones(*args, **options)
        made.n_cleared += 1
        raise torch.AcceleratorError(SAID)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch, "ones", kernel)
    monkeypatch.setattr(Segment, "_warned", False)
    return made


def test_memory_that_cannot_be_pinned_is_the_host_s(cudart: Cudart) -> None:
    """Fails if CUDA's text for it is taken for an unknown error, so that the largest shortage has no diagnosis."""
    cudart.code = 2
    with pytest.raises(MemoryError, match="Unable to allocate 512 bytes of pinned host memory") as raised:
        host_buffer.page_lock(torch.empty(512, dtype=torch.uint8))
    assert is_out_of_memory(raised.value) and "allocate 512 bytes" in str(raised.value)


def test_kept_weights_are_pinned_until_they_are_freed(cudart: Cudart) -> None:
    """Fails if a GPU copies them through pageable memory, memory that CUDA has pinned is unmapped, pages stay locked,
    or a segment on the CPU calls CUDA.
    """
    bucket = Bucket((TensorSpec("a", (5000,), "uint8"),), (0,), 5000)
    kept = KeptVersion()
    with kept.replacing("merged", [bucket], pinned=True) as first:
        address = first.bytes.data_ptr()
    assert cudart.registered == {address: 5120}
    with kept.replacing("merged", [bucket], pinned=True) as again:
        assert again is first
    del first, again
    with kept.replacing("merged", [bucket, bucket], pinned=True) as larger:
        assert cudart.registered == {larger.bytes.data_ptr(): 10240}
    outlives = larger.bytes[:10]
    del larger, kept
    assert not cudart.registered and cudart.calls == 2
    outlives.fill_(1)
    Segment(4096)
    assert cudart.calls == 2


def test_kept_weights_that_cannot_be_pinned_are_pageable(cudart: Cudart, gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if a run ends because its host locks no memory, each segment warns, nothing is logged, or CUDA's
    error fails the next kernel.
    """
    cudart.code = 2
    for _ in range(2):
        Segment(4096, pinned=True).bytes.fill_(7)
    (warned,) = gkd_log.messages
    assert cudart.calls == cudart.n_cleared == 2 and "rollout.max_restarts" in warned and "4096 bytes" in warned


@pytest.mark.usefixtures("pinning")
def test_it_is_the_host_that_is_short(tmp_path: Path) -> None:
    """Fails if the advice is to make room on a GPU that has it, or states without room on the host are lost."""
    first, weights = torch.ones(16), torch.arange(1000.0)
    states = States(CPU, lambda: {PARAMS: [first, weights]})
    states._kinds[PARAMS].buffer = buffer = HostBuffer(pinned=True, slab_bytes=64)
    told: list[bool] = []

    def keys(on_cuda: bool) -> list[str]:
        told.append(on_cuda)
        return ["a.key=1: lower it"]

    with (
        pytest.raises(OutOfMemory) as raised,
        diagnosed(tmp_path, device=torch.device("cuda", 0), who="actor rank 0", phase=Phase.OFFLOAD, advice=keys),
    ):
        states.offload_states()
    assert str(raised.value).startswith("actor rank 0 ran out of memory of the host (pinned) (offloading states): ")
    assert "Unable to allocate" in str(raised.value) and told == [False]
    assert torch.equal(weights, torch.arange(1000.0)) and buffer.mark == 0 and not states.away()


def test_other_errors_of_the_device_pass(pinning: list[torch.AcceleratorError | None]) -> None:
    """Fails if a broken kernel, which torch tells at the next call, is called a lack of memory."""
    pinning[:] = [torch.AcceleratorError("CUDA error: an illegal memory access was encountered")]
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        HostBuffer(pinned=True, slab_bytes=128).take(100)
