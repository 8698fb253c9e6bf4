"""Read how much memory this process uses now, on its GPU and on its host, and record it for each phase of its work.

On CUDA the numbers come from torch's caching allocator and the driver. Without CUDA only the host's memory is known.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from gkd.log import get_logger
from gkd.memory.offload_manager import GIB
from gkd.spans import Phase

log = get_logger("memory")

_ROOT = f"{Path(__file__).parents[2]}/"
_OF_PHASE = ("allocated", "reserved", "peak", "host_rss")  # fields of `MemoryUsage` that `Timeline` records


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory in use, in bytes. The numbers of a device are None without CUDA."""

    where: str  # "cuda:0", "cpu"
    host_rss: int  # memory of this process, including memory that it shares with others
    allocated: int | None = None  # bytes in tensors
    reserved: int | None = None  # bytes of the caching allocator
    peak: int | None = None  # maximum of `allocated` since `reset_peak`
    free: int | None = None  # on the whole device, after all its processes
    total: int | None = None

    def line(self) -> str:
        """Return a human-readable line, in GiB."""
        host = f"host RSS {gib(self.host_rss)} GiB"
        if self.allocated is None or self.reserved is None or self.peak is None:
            return f"{self.where}: {host}"
        device = f"allocated {gib(self.allocated)}, reserved {gib(self.reserved)}, peak {gib(self.peak)}"
        if self.free is not None and self.total is not None:
            device += f", {gib(self.free)} of the device's {gib(self.total)} free"
        return f"{self.where}: {device}; {host}"


def used_device() -> torch.device:
    """Return the CUDA device of this process, or the CPU if CUDA is not initialized. Does not initialize CUDA."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def read_usage(device: torch.device) -> MemoryUsage:
    """Return the memory in use now. Does not synchronize: tensors of running kernels count as torch counts them."""
    host_rss = psutil.Process().memory_info().rss
    if device.type != "cuda":
        return MemoryUsage(device.type, host_rss)
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUsage(
        where=str(device),
        host_rss=host_rss,
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device),
        free=free,
        total=total,
    )


def reset_peak(device: torch.device) -> None:
    """Restart `MemoryUsage.peak` at the present usage. Does nothing without CUDA."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def record_allocations() -> None:
    """Keep the Python stack of each block that is allocated from now on, about 1 us each. CUDA only.

    Snapshots of torch's allocator, such as the one of an out-of-memory error, contain the stacks of the blocks in use.
    """
    torch.cuda.memory._record_memory_history("state", context="state", stacks="python")


def segments(device: torch.device) -> list[dict[str, Any]]:
    """Return the allocator's segments of a device, as in `torch.cuda.memory_snapshot`; none without CUDA.

    Takes the allocator's lock: about 1 ms per few thousand blocks.
    """
    if device.type != "cuda":
        return []
    index = torch.cuda.current_device() if device.index is None else device.index
    return [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]


def allocation_lines(device: torch.device, limit: int) -> list[str]:
    """Return human-readable lines with the memory in use, by the line of code that allocated it, largest first.

    Blocks without a recorded stack are left out: those from before `record_allocations`, and those that the C++ threads
    of a backward pass allocated. Empty without CUDA.
    """
    sizes: Counter[str] = Counter()
    for segment in segments(device):
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block.get("frames"):
                sizes[_place(block["frames"])] += block["size"]
    return [f"{gib(n_bytes)} GiB: {place}" for place, n_bytes in sizes.most_common(limit)]


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the line that allocated a block, and the innermost line of this project.

    Args:
        frames: innermost first, as in `torch.cuda.memory_snapshot`.
    """
    lines = [f"{frame['filename'].removeprefix(_ROOT)}:{frame['line']} in {frame['name']}" for frame in frames]
    lines = [line.rpartition("site-packages/")[2] for line in lines]
    gkd_line = next((line for line in lines if line.startswith("gkd/")), lines[0])
    return gkd_line if gkd_line == lines[0] else f"{lines[0]}, called from {gkd_line}"


def log_gpu_memory_usage(
    head: str,
    logger: logging.Logger | None = None,
    rank: int | None = 0,
    device: torch.device | int | None = None,
    *,
    level: int = logging.INFO,
) -> None:
    """Log one line, on the chosen rank: `head`, this process's rank, and the memory in use.

    The call of ROLL is `(head, logger, rank)`. The call of verl, `(head, logger, level, rank)`, works too: an int as
    fourth argument is the rank, and the third then is the level.

    Args:
        logger: None: the project's, "memory".
        rank: of torch.distributed; only this rank logs. None: every rank logs. A process without a process group always
            logs, and then this is the number in its line.
        device: None: `used_device`.

    Raises:
        ValueError: the process group has no such rank.
    """
    if isinstance(device, int):
        level = level if rank is None else rank
        rank = device
        device = None
    if dist.is_initialized():
        n_ranks = dist.get_world_size()
        this_rank = dist.get_rank()
        if rank is not None and not 0 <= rank < n_ranks:
            raise ValueError(
                f"rank = {rank}: the process group has {n_ranks} ranks. Fix: use 0 to {n_ranks - 1}, or None for all "
                f"ranks; pass a logging level as level={rank}."
            )
        if rank not in (None, this_rank):
            return
        rank = this_rank
    who = "" if rank is None else f"rank {rank}, "
    (logger or log).log(level, "%s: %s%s", head, who, read_usage(used_device() if device is None else device).line())


def clear_memory(device: torch.device | bool | None = None, *, clear_host_memory: bool = False) -> int:
    """Collect garbage and return the caching allocator's free memory to the device.

    Waits for the device, and slows the next allocations, which go to the driver. Not for the middle of a step.

    Args:
        device: None: `used_device`. True or False: `clear_host_memory`, which is the first argument in slime.
        clear_host_memory: also return cached pinned memory to the host. CUDA only.

    Returns:
        Bytes returned to the device; 0 without CUDA.
    """
    if isinstance(device, bool):
        clear_host_memory = device
        device = None
    device = used_device() if device is None else device
    if device.type != "cuda":
        gc.collect()
        trim_heap()
        return 0
    before = torch.cuda.memory_reserved(device)
    gc.collect()
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # first: blocks that other processes have released go back to the cache
        torch.cuda.empty_cache()
        if clear_host_memory:
            torch.accelerator.empty_host_cache()
    return before - torch.cuda.memory_reserved(device)


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc: bytes in use, free, and so on; see mallinfo(3)."""

    _fields_ = [(f"_{i}", ctypes.c_size_t) for i in range(8)] + [(name, ctypes.c_size_t) for name in ("free", "keep")]


# What the C library may keep at the end of a step. The next one would get it back page by page, which took the
# quickstart, whose activations have 200 MiB, as long as a third of its computation.
STEP_KEEPS = 256 << 20


def trim_heap(keep: int = 0) -> None:
    """Return the C library's free memory to the system; by itself it keeps most of what a step has used.

    Args:
        keep: bytes; nothing is returned while the free memory is not larger.
    """
    library = ctypes.CDLL(None)
    if keep and hasattr(library, "mallinfo2"):  # glibc 2.33
        library.mallinfo2.restype = _MallInfo
        if library.mallinfo2().free <= keep:
            return
    library.malloc_trim(0)


def gib(n_bytes: int) -> str:
    """Return the size in GiB without the unit; small sizes keep two significant digits."""
    return f"{n_bytes / GIB:.2f}" if n_bytes >= GIB / 10 or n_bytes <= 0 else f"{n_bytes / GIB:.2g}"


_COUNTS = {  # name here -> name in torch.cuda.memory_stats
    "alloc_retries": "num_alloc_retries",  # after a failed cudaMalloc
    "ooms": "num_ooms",  # because the repeated cudaMalloc failed, too
    "device_allocs": "num_device_alloc",  # cudaMalloc, or cuMemMap of expandable segments
    "device_frees": "num_device_free",  # cudaFree, or cuMemUnmap
}


def read_counts(device: torch.device) -> dict[str, int]:
    """Return the counts of this process on a device since it started, by the names of `_COUNTS`; none without CUDA.

    If cudaMalloc fails, the allocator waits for the device, gives its whole cache back, and tries again. The step
    goes on, only slower: such a run has no error, and cudaMalloc and cudaFree in every step.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)  # empty before the first allocation
    return {name: stats.get(of_torch, 0) for name, of_torch in _COUNTS.items()}


class CountMeter:
    """The counts since the last call of `take`.

    Args:
        read: tests without a GPU give their own.
    """

    def __init__(
        self, device: torch.device, *, read: Callable[[torch.device], Mapping[str, int]] = read_counts
    ) -> None:
        self._device = device
        self._read = read
        self._before: Mapping[str, int] = {}

    def take(self) -> dict[str, float]:
        """Return `memory/alloc_retries`, `ooms`, `device_allocs` and `device_frees`; empty without CUDA."""
        now = self._read(self._device)
        before = self._before
        self._before = now
        return {f"memory/{name}": float(n - before.get(name, 0)) for name, n in now.items()}


class Timeline:
    """Record the memory in use at the end of each phase, and the peak within it.

    The timeline owns the device's peak counter and resets it at the start of every phase, so phases must not nest:
    record them by `SpanRecorder.span` with `outermost`.

    Args:
        read, reset: read the device's memory and restart its peak; tests without a GPU give their own.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        read: Callable[[torch.device], MemoryUsage] = read_usage,
        reset: Callable[[torch.device], None] = reset_peak,
    ) -> None:
        self._device = device
        self._read = read
        self._reset = reset
        self._phases: dict[str, dict[str, float]] = {}

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Record the memory of a block, also if it raises. Several blocks of one phase keep the largest numbers."""
        name = phase.metric
        self._reset(self._device)
        try:
            yield
        finally:
            usage = asdict(self._read(self._device))
            before = self._phases.get(name, {})
            sizes = {f"memory/{name}/{part}_gib": usage[part] for part in _OF_PHASE if usage[part] is not None}
            self._phases[name] = {key: max(size / GIB, before.get(key, 0.0)) for key, size in sizes.items()}

    def take(self) -> dict[str, float]:
        """Return the phases since the last call: `memory/<phase>/allocated_gib`, `reserved_gib`, `peak_gib` and
        `host_rss_gib`; without CUDA only the last.
        """
        phases = self._phases
        self._phases = {}
        return {key: value for numbers in phases.values() for key, value in numbers.items()}


def merge(per_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the maximum of each number over all ranks, and for each peak the lowest rank that has it, `..._rank`.

    Args:
        per_rank: the numbers of each rank, by rank; a rank may lack some of them.
    """
    merged: dict[str, float] = {}
    for rank, numbers in enumerate(per_rank):
        for name, value in numbers.items():
            if name in merged and value <= merged[name]:
                continue
            merged[name] = value
            if name.endswith("peak_gib"):
                merged[f"{name.removesuffix('_gib')}_rank"] = float(rank)
    return merged
