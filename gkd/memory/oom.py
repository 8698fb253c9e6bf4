"""Turn an out-of-memory error into a report: torch's message, the states in memory, and what to change."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from gkd.errors import OutOfMemory
from gkd.memory.fragmentation import ADVICE, fragmentation
from gkd.memory.usage import gib, read_usage
from gkd.spans import Phase

_CPU = "can't allocate memory: you tried to allocate "
PINNED = "pinned host memory"  # text in the error of a failed pinned allocation, see `gkd.memory.host_buffer`


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this is an out-of-memory error of torch, Python, numpy or a CUDA library."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    on_cuda = re.search(r"cuda.{0,40}out of memory|(cublas|cudnn)_status_alloc_failed", text, re.IGNORECASE)
    return isinstance(error, RuntimeError) and (_CPU in text or on_cuda is not None)


@contextmanager
def diagnosed(
    folder: Path,
    *,
    device: torch.device,
    who: str,
    phase: Phase,
    advice: Callable[[bool], Sequence[str]],
    states: Callable[[], Mapping[str, int]] = dict,
) -> Iterator[None]:
    """Raise out-of-memory errors of the block as OutOfMemory with a report; other errors pass.

    Args:
        folder: for the snapshot of torch's CUDA allocator; created when needed.
        who: name of the rank, such as "actor rank 0".
        advice: returns what to change, one line each; called with True if the memory of a GPU is short.
        states: returns the bytes on the device by kind of state.

    Raises:
        OutOfMemory: the block ran out of memory of the device or the host.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # A failed host allocation is not about the device.
        on_cuda = device.type == "cuda" and not isinstance(error, MemoryError) and _CPU not in str(error)
        memory = str(device) if on_cuda else "the host (pinned)" if PINNED in str(error) else "the host"
        lines = [
            f"{who} ran out of memory of {memory} ({phase}): {error}",
            f"in use: {read_usage(device if on_cuda else torch.device('cpu')).line()}",
            *(f"  {kind}: {gib(n_bytes)} GiB" for kind, n_bytes in states().items()),
            *(_of_allocator(device, folder, f"{who}_{phase}") if on_cuda else ()),
            "what to change:",
            *(f"  {line}" for line in advice(on_cuda)),
        ]
        raise OutOfMemory("\n".join(lines)) from error


def _of_allocator(device: torch.device, folder: Path, name: str) -> Iterator[str]:
    """Write the snapshot of torch's CUDA allocator, and yield lines on it."""
    yield f"fragmentation of torch's segments: {fragmentation(device):.2f}. {ADVICE}"
    file = folder / f"oom_{time.strftime('%Y%m%d_%H%M%S')}_{name}.pickle".replace(" ", "_")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
        yield f"saved: {file} (drop it on https://docs.pytorch.org/memory_viz)"
    except OSError as error:  # must not hide the error that is being reported
        yield f"the snapshot was not saved: {error}"
