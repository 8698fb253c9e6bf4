"""Memory reports: fragmentation of constructed snapshots, out of memory in torch's words and for real, the advice."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.errors import ClusterError, OutOfMemory
from gkd.memory.fragmentation import (
    Fragmentation,
    FragmentationWatch,
    check_fragmentation,
    measure,
)
from gkd.memory.oom import (
    FRAGMENTATION,
    SHORTAGE,
    UNCLEAR,
    Request,
    _report,
    diagnosed,
    is_out_of_memory,
    parse,
    verdict,
)
from gkd.memory.remedies import Shortage
from gkd.memory.usage import MemoryUsage
from gkd.spans import Phase

GIB, MIB = 1 << 30, 1 << 20
CPU = torch.device("cpu")
USED, FREE, PENDING = "active_allocated", "inactive", "active_pending_free"


def segment(*blocks: tuple[str, int], large: bool = True, address: int = 0, **more: Any) -> dict[str, Any]:
    """A segment as torch lists it; blocks as (state, MiB), in order."""
    listed, at = [], address
    for state, mib in blocks:
        listed.append({"address": at, "size": mib * MIB, "requested_size": mib * MIB, "state": state})
        at += mib * MIB
    return {
        "device": 0,
        "address": address,
        "total_size": at - address,
        "segment_type": "large" if large else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "stream": 0,
        "blocks": listed,
    } | more


def in_mib(found: Fragmentation) -> dict[str, float]:
    names = ("allocated", "pending", "reserved", "free", "largest_free", "releasable", "elsewhere")
    return {name: getattr(found, name) / MIB for name in names}


def test_a_snapshot_by_hand() -> None:
    """Fails if a block in use counts as free, one that waits for a stream counts as either, or a ratio is another."""
    found = measure(
        [
            segment((USED, 100), (FREE, 60), (USED, 40)),
            segment((FREE, 30), (PENDING, 20), (FREE, 50)),
            segment((FREE, 100)),
            segment((USED, 1), (FREE, 1), large=False),
            segment((USED, 8), (FREE, 9), segment_pool_id=(0, 1)),
        ],
        "cuda:0",
    )
    assert in_mib(found) == {
        "allocated": 100 + 40 + 1 + 8,
        "pending": 20,
        "reserved": 200 + 100 + 100 + 2 + 17,
        "free": 60 + 30 + 50 + 100 + 1 + 9,
        "largest_free": 100,
        "releasable": 100,  # the only segment that is free as a whole
        "elsewhere": 1 + 9,
    }
    assert found.external_ratio == pytest.approx(1 - 100 / 250)
    assert found.unused_ratio == pytest.approx((419 - 149) / 419)


def test_of_expandable_segments_whole_pages_can_go_back() -> None:
    """Fails if a page of 20 MiB that a block in use reaches into counts as one that can be given back."""
    # Pages end at 20, 40, 60, 80: the free blocks are 15 to 65, two whole pages, and 70 to 80, none.
    blocks = ((USED, 15), (FREE, 50), (USED, 5), (FREE, 10))
    for address in (0, 7 << 40):
        found = measure([segment(*blocks, address=address, is_expandable=True)], "cuda:0")
        assert (found.releasable / MIB, found.free / MIB) == (40, 60)
    assert measure([segment(*blocks)], "cuda:0").releasable == 0


@pytest.mark.parametrize(
    ("used", "free", "over"),
    [
        (1000, [400, 300, 300], True),  # 0.6 and 0.5
        (1000, [1000], False),  # in one piece
        (9000, [400, 300, 300], False),  # a tenth of all is unused
        (100, [200, 100, 100], False),  # 0.5 and 0.8, but of 400 MiB
    ],
)
def test_a_warning_takes_much_unused_in_pieces(used: int, free: list[int], over: bool) -> None:
    """Fails if a healthy cache is warned of, or memory that lies in pieces is not."""
    found = measure([segment((USED, used)), *(segment((FREE, mib), (USED, 0)) for mib in free)], "cuda:0")
    assert found.over(0.2) == over
    whole = measure([segment((USED, used)), *(segment((FREE, mib)) for mib in free)], "cuda:0")
    assert not whole.over(0.2), "all of it can go back to the device, and come again in one piece"
    # As after the first step on a real card: 24 of 25 GiB of free memory are whole segments.
    mixed = measure([segment((USED, 26_000), (FREE, 640), (USED, 1)), *[segment((FREE, 500))] * 50], "cuda:0")
    assert min(mixed.external_ratio, mixed.unused_ratio) > 0.4 and not mixed.over(0.2)


def test_the_report_and_the_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if the report lacks the device, the ratios or the allocator's calls, or a warning comes without a remedy or
    below the limit.
    """
    logger = logging.getLogger("test_memory_fragmentation")
    found = measure([segment((FREE, 600), (USED, 500), (FREE, 500))], "cuda:0")  # 0.4545, 0.6875
    usage = MemoryUsage("cuda:0", 5 << 30, 500 * MIB, 1600 * MIB, 2 << 30, 10 << 30, 80 << 30)
    card = {
        "fragmentation": found,
        "read_usage": usage,
        "read_counts": {"alloc_retries": 7, "ooms": 6, "device_allocs": 512, "device_frees": 256},
    }
    for name, value in card.items():
        monkeypatch.setattr(f"gkd.memory.fragmentation.{name}", lambda device, value=value: value)
    with caplog.at_level(logging.INFO, logger.name):
        assert check_fragmentation(torch.device("cuda", 0), warn=0.46, logger=logger) is found
    (report,) = caplog.messages
    assert usage.line() in report and found.line() in report and "reserved 1.56" in report
    assert [int(word) for word in report.splitlines()[-1].split() if word.isdecimal()] == [7, 6, 512, 256]
    caplog.clear()
    check_fragmentation(torch.device("cuda", 0), warn=0.45, logger=logger)
    (message,) = caplog.messages
    assert all(number in message for number in ("0.45", "0.69", "0.59"))
    for word in ("0.45", "expandable_segments:True", "actor.fsdp_cpu_offload"):
        assert word in message


def test_every_tenth_step_is_looked_at(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if each step pays for a list of all blocks, none does, or a number is reported twice."""
    logger, looks = logging.getLogger("test_memory_fragmentation"), []
    found = measure([segment((USED, 3), (FREE, 1))], "cuda:0")

    def look(device: torch.device) -> Fragmentation:
        looks.append(device)
        return found

    monkeypatch.setattr("gkd.memory.fragmentation.fragmentation", look)
    watch = FragmentationWatch(torch.device("cuda", 0), logger)
    told = []
    for _ in range(21):
        watch.after_step()
        told.append(watch.take())
    numbers = {"memory/external_ratio": 0.0, "memory/unused_ratio": 0.25}
    assert told == [numbers if step % 10 == 0 else {} for step in range(21)]
    assert len(looks) == 3


def test_without_a_caching_allocator_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a run on CPU reports or warns of a fragmentation that cannot be."""
    logger, cpu = logging.getLogger("test_memory_fragmentation"), torch.device("cpu")
    found = check_fragmentation(cpu, warn=0.0, logger=logger)
    assert (found.external_ratio, found.unused_ratio, found.free) == (0.0, 0.0, 0)
    assert found == measure([], "cpu") and "cpu" in found.line()
    assert torch.cuda.is_initialized() or check_fragmentation(logger=logger) == found
    watch = FragmentationWatch(cpu, logger)
    watch.after_step()
    assert watch.take() == {} and not caplog.messages


TAIL = (
    " If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid"
    " fragmentation.  See documentation for Memory Management "
    " (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
# As torch 2.11 and 2.13 write them; the last as torch 2.0 did.
PLAIN = (
    "CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.50 GiB of which 12.75 GiB is "
    "free. Including non-PyTorch memory, this process has 18.73 GiB memory in use. Of the allocated memory 9.00 GiB is "
    "allocated by PyTorch, and 9.50 GiB is reserved by PyTorch but unallocated." + TAIL
)
LIMITED = (
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 3 has a total capacity of 255.98 GiB of which 244.50 GiB is "
    "free. Process 17 has 1.00 GiB memory in use. 1.25 GiB allowed; Of the allocated memory 1017.00 MiB is allocated "
    "by PyTorch, with 17.00 MiB allocated in private pools (e.g., CUDA Graphs), and 55.00 MiB is reserved by PyTorch "
    "but unallocated." + TAIL
)
FULL = (
    "CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has a total capacty of 8.00 GiB of which 0 bytes is free. "
    "Of the allocated memory 7.50 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
)


def test_what_torch_says_is_read() -> None:
    """Fails if a number of torch's message is read wrongly, or one kind of message not at all."""
    assert parse(PLAIN) == Request(
        requested=int(22.78 * GIB),
        total=63 * GIB // 2,
        device_free=51 * GIB // 4,
        allocated=9 * GIB,
        cached=19 * GIB // 2,
    )
    assert parse(LIMITED) == Request(
        requested=2 * MIB,
        total=int(255.98 * GIB),
        device_free=489 * GIB // 2,
        allowed=5 * GIB // 4,
        allocated=1017 * MIB,
        cached=55 * MIB,
    )
    assert parse(LIMITED).free == (1280 - 1017 - 55) * MIB
    assert parse(FULL) == Request(requested=512, total=8 * GIB, device_free=0, allocated=15 * GIB // 2, cached=0)
    assert parse("NCCL WARN Cuda failure 2 'out of memory'") == Request()


def test_a_cuda_error_as_the_user_reads_it(tmp_path: Path) -> None:
    """Fails if the report lacks other processes on the GPU, which matters most on a shared one."""
    shared = PLAIN.replace("Including non-PyTorch", "Process 4711 has 2.50 GiB memory in use. Including non-PyTorch")
    text = _report(
        torch.OutOfMemoryError(shared), tmp_path, torch.device("cuda", 0), "actor rank 0", Phase.EXPORT, keys
    )
    first, second = text.splitlines()[:2]
    assert first.startswith("actor rank 0 ran out of memory of cuda:0 (export): ")
    assert re.findall(r"[0-9.]+ GiB", first) == ["22.78 GiB", "12.75 GiB", "9.50 GiB"] and "a shortage" in first
    assert re.findall(r"[0-9.]+ GiB", second) == ["2.50 GiB", "18.73 GiB"] and "process 4711" in second
    # No GPU here: a diagnosis that fails is reported, and hides nothing.
    assert torch.cuda.is_available() or "failed: the allocator's blocks (" in text


def cut(elsewhere: int) -> Fragmentation:
    return Fragmentation("cuda:0", 0, 0, 10 * GIB, 5 * GIB, GIB, 0, elsewhere)


@pytest.mark.parametrize(
    ("asked", "free", "cached", "elsewhere", "expected"),
    [
        (4 * GIB, 2 * GIB, 1 * GIB, 0, SHORTAGE),
        (4 * GIB, 2 * GIB, 2 * GIB, 0, FRAGMENTATION),
        (4 * GIB, 0, 5 * GIB, 0, FRAGMENTATION),
        (4 * GIB, 2 * GIB, 2 * GIB, 1, SHORTAGE),  # what is in other pools does not help
        (MIB // 2, 0, MIB, MIB, FRAGMENTATION),  # a small tensor may use the small pools
        (4 * GIB, 5 * GIB, 0, 0, UNCLEAR),  # enough is free now: some was released in the meantime
        (None, 0, 0, 0, UNCLEAR),
    ],
)
def test_shortage_or_fragmentation(asked: int | None, free: int, cached: int, elsewhere: int, expected: str) -> None:
    """Fails if the advice is defragmentation for too little memory, or more memory for fragmentation."""
    request = Request(requested=asked, device_free=free, cached=cached)
    assert verdict(request, cut(elsewhere)) == expected
    if not elsewhere:
        assert verdict(request, None) == expected
    assert verdict(Request(requested=asked, device_free=free), None) == UNCLEAR


def test_a_limit_counts_as_the_device() -> None:
    """Fails if memory that this process may not take hides a shortage within its limit."""
    request = Request(requested=300 * MIB, device_free=50 * GIB, allowed=GIB, allocated=700 * MIB, cached=100 * MIB)
    assert request.free == 224 * MIB
    assert verdict(request, None) == FRAGMENTATION
    assert verdict(Request(400 * MIB, None, 50 * GIB, GIB, 700 * MIB, 100 * MIB), None) == SHORTAGE


def test_which_errors_are_of_memory() -> None:
    """Fails if an error of memory is passed on unexplained, or another one is called that."""
    texts = [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error: unhandled cuda error; Last error:\nCuda failure 2 'out of memory'",
        "Triton Error [CUDA]: out of memory",
    ]
    assert all(is_out_of_memory(RuntimeError(text)) for text in texts)
    assert is_out_of_memory(torch.OutOfMemoryError(PLAIN)) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(RuntimeError("the queue is out of memory slots"))
    assert not is_out_of_memory(ClusterError(texts[0])), "it is explained already"


def keys(shortage: Shortage) -> list[str]:
    return [f"a.key=1: lower it in the {shortage.phase}, {shortage.on_cuda}, {shortage.fragmented}"]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_real_failure_of_the_host_is_explained(tmp_path: Path, kind: str) -> None:
    """Fails if the report lacks the request, the keys to change or the file; or if the file does not say where it
    happened.
    """

    def too_much() -> object:
        return torch.empty(2**50) if kind == "torch" else np.ones(2**50)

    with (
        pytest.raises(OutOfMemory) as raised,
        diagnosed(tmp_path / "memory", device=CPU, who="actor rank 1", phase=Phase.TRAIN, advice=keys),
    ):
        too_much()
    text = str(raised.value)
    assert text.startswith("actor rank 1 ran out of memory of the host (training step): ")
    assert "a shortage" in text and "  a.key=1: lower it in the training step, False, False" in text
    assert ("4194304.00 GiB failed" if kind == "torch" else "GiB failed") in text
    (file,) = (tmp_path / "memory").iterdir()
    assert f"saved: {file}" in text and file.name.endswith("_actor_rank_1_training_step.json")
    report = json.loads(file.read_text())
    assert report["verdict"] == SHORTAGE and report["request"]["requested"] >= 2**52
    assert any("too_much" in line for line in report["traceback"])
    assert report["usage"]["where"] == "cpu" and report["fragmentation"] is None


def test_other_errors_pass_untouched(tmp_path: Path) -> None:
    """Fails if a bug is reported as a lack of memory, or a diagnosis is diagnosed again by the block around it."""
    for error in (RuntimeError("shapes"), ValueError("x"), OutOfMemory("told"), KeyboardInterrupt()):
        with (
            pytest.raises(type(error)) as raised,
            diagnosed(tmp_path, device=CPU, who="actor rank 0", phase=Phase.EXPORT, advice=keys),
        ):
            raise error
        assert raised.value is error
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_is_no_other_error(tmp_path: Path) -> None:
    """Fails if a full or read-only disk hides that memory ran out."""
    (tmp_path / "memory").write_text("a file, where the folder should be")
    with (
        pytest.raises(OutOfMemory) as raised,
        diagnosed(tmp_path / "memory", device=CPU, who="actor rank 0", phase=Phase.EXPORT, advice=keys),
    ):
        torch.empty(2**50)
    assert "FileExistsError" in str(raised.value) and "saved: " not in str(raised.value)
