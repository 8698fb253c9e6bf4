"""Test the memory reports with a real CUDA allocator. Not run in CI: pytest -m gpu tests/gpu

Needs 6 GiB of free GPU memory and an allocator without expandable segments, which would not fragment as is wanted here.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gkd.config.schema_rollout import ALLOCATOR_VARIABLES
from gkd.errors import OutOfMemory
from gkd.memory.fragmentation import fragmentation, warn_of_fragmentation
from gkd.memory.oom import diagnosed
from gkd.memory.usage import GIB, CountMeter, Timeline, clear_memory, read_usage, record_allocations, used_device
from gkd.spans import Phase

EXPANDABLE = any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(EXPANDABLE, reason="needs an allocator without expandable segments"),
]

MIB = 1 << 20
PIECE, N_PIECES = 16 * MIB, 128
COUNTS = [f"memory/{name}" for name in ("alloc_retries", "ooms", "device_allocs", "device_frees")]


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Yield with an empty cache."""
    torch.cuda.init()
    clear_memory(torch.device("cuda", torch.cuda.current_device()))
    yield torch.device("cuda", torch.cuda.current_device())
    clear_memory(torch.device("cuda", torch.cuda.current_device()))


def block(n_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def pieces(device: torch.device) -> list[Tensor]:
    """Return every other piece of a 2 GiB segment: 1 GiB is free, in blocks of one piece each."""
    whole = block(PIECE * N_PIECES, device)
    del whole  # its segment stays in the cache, and the pieces are cut from it
    cut = [block(PIECE, device) for _ in range(N_PIECES)]
    return cut[::2]


@contextmanager
def limited(n_bytes: int, device: torch.device) -> Iterator[None]:
    """Limit this process to this many additional bytes of the device."""
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + n_bytes) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_what_is_in_use(device: torch.device) -> None:
    """Fails if the reported bytes differ from those of the allocator and the driver."""
    before = read_usage(device)
    assert used_device() == device and before.where == str(device)
    kept, gone = block(64 * MIB, device), block(192 * MIB, device)
    del gone
    usage = read_usage(device)
    assert usage.allocated - before.allocated == kept.nbytes
    assert usage.peak - before.allocated >= 256 * MIB
    assert usage.reserved - usage.allocated >= 192 * MIB
    assert usage.free is not None and usage.total is not None and 0 < usage.free < usage.total
    assert clear_memory(device) >= 192 * MIB
    assert read_usage(device).allocated == usage.allocated, "what is in use stays"


def test_a_step_that_gives_the_cache_back_is_counted(device: torch.device) -> None:
    """Fails if a retry after a failed cudaMalloc, or a call of the driver, is not in the numbers of its step."""
    meter = CountMeter(device)
    meter.take()
    with limited(256 * MIB, device):
        cached = block(192 * MIB, device)
        del cached
        assert meter.take() == dict.fromkeys(COUNTS, 0.0) | {"memory/device_allocs": 1.0}
        kept = block(224 * MIB, device)  # fits only without the cached block
        assert meter.take() == dict.fromkeys(COUNTS, 1.0) | {"memory/ooms": 0.0}
        with pytest.raises(torch.cuda.OutOfMemoryError):
            block(512 * MIB, device)
    assert meter.take()["memory/ooms"] == 1.0
    assert kept.nbytes == 224 * MIB and meter.take() == dict.fromkeys(COUNTS, 0.0)


def test_pinned_memory_goes_back_to_the_host(device: torch.device) -> None:
    """Fails if clear_host_memory leaves cached pinned memory with the process."""
    pinned = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    del pinned
    held = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    clear_memory(device)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == held >= 64 * MIB
    clear_memory(device, clear_host_memory=True)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= held - 64 * MIB


def test_each_phase_has_its_own_peak(device: torch.device) -> None:
    """Fails if a phase reports another phase's peak, or its remaining bytes are not those of its tensors."""
    timeline, before = Timeline(device), torch.cuda.memory_allocated(device)
    with timeline.during(Phase.TRAIN):
        gone = block(512 * MIB, device)
        del gone
        kept = block(128 * MIB, device)
    with timeline.during(Phase.EXPORT):
        pass
    taken = timeline.take()
    step, export = (
        {name: taken[f"memory/{phase}/{name}_gib"] * GIB - before for name in ("allocated", "peak", "reserved")}
        for phase in ("training_step", "export")
    )
    assert (step["allocated"], step["peak"]) == (kept.nbytes, 512 * MIB)
    assert (export["allocated"], export["peak"]) == (kept.nbytes, kept.nbytes)
    assert step["reserved"] >= 512 * MIB


def test_fragmentation_made_on_purpose(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a segment with a hole after each piece is not reported as fragmented, or a cache without holes is."""
    logger = logging.getLogger("test_memory_cuda")
    whole = block(PIECE * N_PIECES, device)
    del whole
    assert warn_of_fragmentation(device, logger) < 0.01 and not caplog.messages, "all of it can return"
    clear_memory(device)
    kept = pieces(device)
    assert warn_of_fragmentation(device, logger) == pytest.approx(0.5, abs=0.02)
    assert len(caplog.messages) == 1 and "expandable_segments:True" in caplog.messages[0]
    kept.clear()
    clear_memory(device)
    assert fragmentation(device) < 0.2


def test_a_failed_allocation_is_reported_with_a_snapshot(device: torch.device, tmp_path: Path) -> None:
    """Fails if the report lacks the fragmentation, or the snapshot the stacks that torch's viewer shows."""
    record_allocations()
    kept = pieces(device)
    with (
        pytest.raises(OutOfMemory) as raised,
        limited(256 * MIB, device),
        diagnosed(tmp_path, device=device, who="actor rank 0", phase=Phase.TRAIN, advice=lambda gpu: [f"a.key {gpu}"]),
    ):
        block(900 * MIB, device)  # 256 MiB may still be taken, and 1 GiB is free in pieces of 16 MiB
    text = str(raised.value)
    assert text.startswith(f"actor rank 0 ran out of memory of {device} (training step): CUDA out of memory. Tried to")
    assert "segments: 0.5" in text and text.endswith("a.key True")
    (snapshot,) = tmp_path.glob("*.pickle")
    segments = pickle.loads(snapshot.read_bytes())["segments"]
    segments = [segment for segment in segments if segment["device"] == device.index]
    assert sum(segment["total_size"] for segment in segments) >= PIECE * N_PIECES
    used = [piece for s in segments for piece in s["blocks"] if piece["state"] == "active_allocated"]
    assert sum(piece["size"] for piece in used if piece["frames"]) >= GIB
    assert len(kept) == N_PIECES // 2
