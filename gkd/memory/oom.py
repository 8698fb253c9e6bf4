"""Turn an out-of-memory error into a report: shortage or fragmentation, what is in memory, and what to change.

    with diagnosed(folder, device=device, who="actor rank 0", phase=Phase.TRAIN, advice=keys_to_change):
        student.train_step(batches)

torch's message describes the state at the failed allocation. The allocator's blocks are read afterwards, when some
tensors of the failed work may be gone.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from gkd.errors import OutOfMemory
from gkd.memory.fragmentation import Fragmentation, fragmentation
from gkd.memory.remedies import Shortage
from gkd.memory.usage import allocation_lines, gib, read_usage
from gkd.spans import Phase

Verdict = Literal["shortage", "fragmentation", "unclear"]
SHORTAGE: Verdict = "shortage"
FRAGMENTATION: Verdict = "fragmentation"
UNCLEAR: Verdict = "unclear"

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|[KMGTPE]iB)"
_CPU = "can't allocate memory: you tried to allocate "
PINNED = "pinned host memory"  # text in the error of a failed pinned allocation, see `gkd.memory.host_buffer`
_SMALL = 1 << 20  # bytes; larger tensors are never put into the allocator's small pools
_MAX_LINES = 12  # lines of the largest allocations


@dataclass(frozen=True, slots=True)
class Request:
    """The numbers in an out-of-memory error, in bytes; None: not in the message."""

    requested: int | None = None
    total: int | None = None  # memory of the device
    device_free: int | None = None
    allowed: int | None = None  # limit of this process, if there is one
    allocated: int | None = None  # bytes in tensors of this process
    cached: int | None = None  # bytes in free blocks of torch's allocator

    @property
    def free(self) -> int | None:
        """Bytes that this process could still have taken from the device."""
        if self.allowed is None or self.allocated is None or self.cached is None:
            return self.device_free
        left = max(0, self.allowed - self.allocated - self.cached)
        return left if self.device_free is None else min(left, self.device_free)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this is an out-of-memory error of torch, Python, numpy or a CUDA library."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    on_cuda = re.search(r"cuda.{0,40}out of memory|(cublas|cudnn)_status_alloc_failed", text, re.IGNORECASE)
    return isinstance(error, RuntimeError) and (_CPU in text or on_cuda is not None)


def parse(text: str) -> Request:
    """Return the numbers in the message of such an error."""
    return Request(
        requested=_found(rf"[Tt]ried to allocate {_SIZE}|Unable to allocate {_SIZE}", text),
        total=_found(rf"total capaci?ty of {_SIZE}", text),
        device_free=_found(rf"of which {_SIZE} is free", text),
        allowed=_found(rf"{_SIZE} allowed", text),
        allocated=_found(rf"Of the allocated memory {_SIZE}", text),
        cached=_found(rf"{_SIZE} is reserved by PyTorch but unallocated", text),
    )


def verdict(request: Request, found: Fragmentation | None) -> Verdict:
    """Return whether the free memory would have been enough in one piece (fragmentation) or not (shortage).

    Args:
        found: the allocator's state after the error, with the free memory that this request could not use in any case.
    """
    if request.requested is None or request.free is None or request.cached is None:
        return UNCLEAR
    if request.free >= request.requested:  # another limit, or memory was released since
        return UNCLEAR
    unusable = 0 if found is None or request.requested <= _SMALL else found.elsewhere
    usable = max(0, request.cached - unusable)
    return FRAGMENTATION if request.free + usable >= request.requested else SHORTAGE


@contextmanager
def diagnosed(
    folder: Path,
    *,
    device: torch.device,
    who: str,
    phase: Phase,
    advice: Callable[[Shortage], Sequence[str]],
) -> Iterator[None]:
    """Raise out-of-memory errors of the block as OutOfMemory with a report; other errors pass.

    Args:
        folder: for the report, and on CUDA the allocator's snapshot; created when needed.
        device: of the rank.
        who: name of the rank, such as "actor rank 0".
        advice: returns what to change, one line each.

    Raises:
        OutOfMemory: the block ran out of memory of the device or the host.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(_report(error, folder, device, who, phase, advice)) from error


def _report(
    error: BaseException,
    folder: Path,
    device: torch.device,
    who: str,
    phase: Phase,
    advice: Callable[[Shortage], Sequence[str]],
) -> str:
    """Return the human-readable report, and write its files."""
    # A failed host allocation is not about the device.
    is_of_host = isinstance(error, MemoryError) or _CPU in str(error)
    at = device if device.type == "cuda" and not is_of_host else torch.device("cpu")
    request = parse(str(error))
    if at.type != "cuda":  # the host's errors do not contain its free memory
        host = psutil.virtual_memory()
        request = Request(requested=request.requested, total=host.total, device_free=host.available, cached=0)
    troubles: list[str] = []  # errors of the diagnosis itself: the host may be out of memory, too
    found = _tried("the allocator's blocks", lambda: fragmentation(at), troubles) if at.type == "cuda" else None
    usage = _tried("memory in use", lambda: read_usage(at), troubles)
    largest = _tried("the largest allocations", lambda: allocation_lines(at, _MAX_LINES), troubles) or []
    judged = verdict(request, found)
    memory = str(at) if at.type != "cpu" else "the host (pinned)" if PINNED in str(error) else "the host"
    parts = [
        f"{who} ran out of memory of {memory} ({phase}): {_judgement(request, judged, found)}",
        *_users(str(error)),
        *(["allocated by Python code and in use:"] if largest else []),
        *(f"  {line}" for line in largest),
        "what to change:",
        *(f"  {line}" for line in advice(Shortage(phase, at.type == "cuda", judged == FRAGMENTATION))),
    ]
    details = {
        "who": who,
        "phase": str(phase),
        "verdict": judged,
        "request": asdict(request),
        "usage": None if usage is None else asdict(usage),
        "fragmentation": None if found is None else asdict(found),
        "largest_allocations": largest,
        "error": str(error),
        "traceback": traceback.format_exception(error),
    }
    name = f"oom_{time.strftime('%Y%m%d_%H%M%S')}_{who}_{phase}".replace(" ", "_")
    saved = [
        _tried("the report", lambda: _write_report(folder / f"{name}.json", details), troubles),
        _tried("the snapshot", lambda: _write_snapshot(folder / f"{name}.pickle"), troubles) if found else None,
    ]
    parts += [f"saved: {file}" for file in saved if file is not None]
    return "\n".join([*parts, *(f"failed: {trouble}" for trouble in troubles)])


def _judgement(request: Request, judged: Verdict, found: Fragmentation | None) -> str:
    size = "an allocation of unknown size failed"
    if request.requested is not None:
        size = f"an allocation of {_gib(request.requested)} failed"
    cached = "" if not request.cached else f" and {_gib(request.cached)} in torch's cache"
    free = "" if request.free is None else f"; {_gib(request.free)} were free there{cached}"
    limit = "" if request.allowed is None else f" (this process may have {_gib(request.allowed)})"
    largest = "" if found is None else f"; the largest free block is {_gib(found.largest_free)}"
    meaning = {
        SHORTAGE: "a shortage: there was less free memory",
        FRAGMENTATION: f"fragmentation: there was enough free memory, but not in one piece{largest}",
        UNCLEAR: "the message does not show whether this is a shortage or fragmentation",
    }[judged]
    return f"{size}{free}{limit}. This is {meaning}." if judged != UNCLEAR else f"{size}{free}{limit}; {meaning}."


def _users(text: str) -> list[str]:
    """Return the processes that use the device, from torch's message; in a container their ids are the host's."""
    found = re.findall(rf"(Process \d+|this process) has {_SIZE} memory in use", text)
    users = ", ".join(f"{who.lower()} {_gib(_bytes(number, unit))}" for who, number, unit in found)
    return [f"in use on it: {users}"] if users else []


def _tried(what: str, look: Callable[[], Any], troubles: list[str]) -> Any:
    """Return None and note the error if `look` fails: it must not hide the error that is being diagnosed."""
    try:
        return look()
    except Exception as error:
        troubles.append(f"{what} ({type(error).__name__}: {error})")
        return None


def _write_report(file: Path, details: dict[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(details, indent=1) + "\n")
    return file


def _write_snapshot(file: Path) -> str:
    """Write all segments and blocks, for https://docs.pytorch.org/memory_viz."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(file))
    return f"{file} (drop it on https://docs.pytorch.org/memory_viz)"


def _found(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    if match is None:
        return None
    number, unit = (part for part in match.groups() if part is not None)
    return _bytes(number, unit)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _gib(n_bytes: int) -> str:
    return f"{gib(n_bytes)} GiB"
