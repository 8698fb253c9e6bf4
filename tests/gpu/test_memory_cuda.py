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
from gkd.memory.fragmentation import FragmentationWatch, check_fragmentation, fragmentation
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


def test_the_snapshot_adds_up_to_the_allocators_own_numbers(device: torch.device) -> None:
    """Fails if a state or a kind of block of this torch counts as something else here."""
    kept = [block(size, device) for size in (100, 3 * MIB, 40 * MIB)]
    gone = [block(size, device) for size in (200, 5 * MIB, 80 * MIB)]
    gone.clear()
    found = fragmentation(device)
    assert found.allocated == torch.cuda.memory_allocated(device) >= sum(tensor.nbytes for tensor in kept)
    assert found.reserved == torch.cuda.memory_reserved(device)
    assert found.allocated + found.pending + found.free == found.reserved
    assert found.pending == 0 and found.largest_free >= 80 * MIB
    assert clear_memory(device) == found.releasable


def test_a_block_that_another_stream_still_reads_is_not_free(device: torch.device) -> None:
    """Fails if memory of a pending copy is reported as free."""
    torch.cuda.synchronize(device)
    side, lent = torch.cuda.Stream(device), block(256 * MIB, device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)  # a second or more
    lent.record_stream(side)
    del lent
    found = fragmentation(device)
    assert found.pending == 256 * MIB
    torch.cuda.synchronize(device)


def test_fragmentation_made_on_purpose(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a segment with a hole after each piece is not reported as fragmented, or one without holes is."""
    logger = logging.getLogger("test_memory_cuda")
    with caplog.at_level(logging.WARNING, logger.name):
        before = fragmentation(device)
        kept = pieces(device)
        found = check_fragmentation(device, warn=0.2, logger=logger)
        assert found.allocated - before.allocated == sum(tensor.nbytes for tensor in kept) == GIB
        assert found.free - before.free == GIB and found.largest_free == max(PIECE, before.largest_free)
        assert found.external_ratio == pytest.approx(1 - PIECE / GIB, abs=0.01)
        assert found.unused_ratio == pytest.approx(0.5, abs=0.02)
        assert found.releasable == before.releasable, "every segment is in use somewhere"
        assert len(caplog.messages) == 1 and "expandable_segments:True" in caplog.messages[0]
        watch = FragmentationWatch(device, logger)
        watch.after_step()
        assert watch.take()["memory/external_ratio"] == found.external_ratio
        kept.clear()
        clear_memory(device)
        caplog.clear()
        assert check_fragmentation(device, warn=0.2, logger=logger).free == before.free
        assert not caplog.messages


def test_memory_in_pieces_is_told_from_too_little(device: torch.device, tmp_path: Path) -> None:
    """Fails if an allocation that would fit in one piece is called a shortage, one that never would fragmentation, or
    the report lacks where memory was allocated, or the snapshot the stacks that torch's viewer shows.
    """
    told: list[tuple[bool, bool]] = []
    record_allocations()
    kept = pieces(device)

    def failed(n_bytes: int, phase: Phase) -> str:
        with (
            pytest.raises(OutOfMemory) as raised,
            limited(256 * MIB, device),
            diagnosed(
                tmp_path,
                device=device,
                who="actor rank 0",
                phase=phase,
                advice=lambda shortage: told.append((shortage.on_cuda, shortage.fragmented)) or ["a.key=1: lower it"],
            ),
        ):
            block(n_bytes, device)
        return str(raised.value)

    # 256 MiB may still be taken, and 1 GiB is free in pieces of 16 MiB.
    in_pieces, too_little = failed(900 * MIB, Phase.TRAIN), failed(1800 * MIB, Phase.EVALUATE)
    assert "This is fragmentation" in in_pieces and "the largest free block is 0.016 GiB" in in_pieces
    assert "This is a shortage" in too_little
    assert told == [(True, True), (True, False)]
    for text in (in_pieces, too_little):
        assert text.startswith(f"actor rank 0 ran out of memory of {device} (")
        assert "  1.00 GiB: " in text and " in block" in text and "a.key=1: lower it" in text
    snapshots = sorted(tmp_path.glob("*.pickle"))
    assert len(snapshots) == len(list(tmp_path.glob("*.json"))) == 2
    segments = pickle.loads(snapshots[0].read_bytes())["segments"]
    segments = [segment for segment in segments if segment["device"] == device.index]
    assert sum(segment["total_size"] for segment in segments) >= PIECE * N_PIECES
    used = [piece for s in segments for piece in s["blocks"] if piece["state"] == "active_allocated"]
    assert sum(piece["size"] for piece in used if piece["frames"]) >= GIB
    assert len(kept) == N_PIECES // 2
