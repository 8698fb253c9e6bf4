"""Host memory that the sender and the engines of one host have in common.

It is an anonymous file (`memfd_create`) that others open as `/proc/PID/fd/N`. It has no name that could be left behind:
the system frees it with the last process that uses it, also after SIGKILL. The size of /dev/shm does not matter.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from gkd.errors import WeightSyncError
from gkd.log import get_logger
from gkd.memory.host_buffer import page_lock, page_unlock

log = get_logger("weight_sync")
_FIX = "Fix: weight_sync.transport = gloo, or rollout.max_restarts = 0, which keeps no weights"


@dataclass(frozen=True, slots=True)
class SegmentId:
    """How another process of this host finds a segment. All numbers fit into 64 bits."""

    pid: int
    fd: int
    n_bytes: int
    token: int  # unique: a process may give the same fd to another segment later


class Segment:
    """Shared memory that is created here, allocated at once, and freed with this object.

    Args:
        pinned: page-lock it, so that a GPU copies into it asynchronously. Where CUDA refuses, it is pageable.

    Raises:
        WeightSyncError: the host has not enough memory, or the process may not allocate that much.
    """

    _warned: ClassVar[bool] = False

    def __init__(self, n_bytes: int, *, pinned: bool = False) -> None:
        fd = os.memfd_create("gkd_weights", os.MFD_CLOEXEC)
        try:
            # Reserve the pages now: later a lack of memory would be a SIGBUS in the middle of a copy.
            os.posix_fallocate(fd, 0, n_bytes)
            self._memory = mmap.mmap(fd, n_bytes)
        except OSError as error:
            os.close(fd)
            raise WeightSyncError(
                f"weight_sync.transport: no shared memory of {n_bytes / 2**30:.2f} GiB for the weights: {error}. {_FIX}"
            ) from error
        self._fd = fd
        self.id = SegmentId(os.getpid(), fd, n_bytes, secrets.randbits(63))
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        if pinned:
            self._pin()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)  # the mappings, here and elsewhere, stay valid

    def _pin(self) -> None:
        try:
            page_lock(self.bytes)
        except MemoryError as error:
            if not Segment._warned:
                Segment._warned = True
                log.warning(
                    "kept weights are in pageable memory, so each weight sync takes several times longer: %s. Fix: let "
                    "the process lock this much memory, or rollout.max_restarts = 0, which keeps no weights",
                    error,
                )
            return
        # It holds the mapping until CUDA has released it. At exit CUDA may be gone, and the system frees the pages.
        weakref.finalize(self, page_unlock, self.bytes).atexit = False


def attached(segment: SegmentId) -> torch.Tensor:
    """Return the bytes of another process's segment, for reading. Raises WeightSyncError."""
    path = f"/proc/{segment.pid}/fd/{segment.fd}"
    try:
        with open(path, "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), segment.n_bytes), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            f"weight_sync.transport = shared_memory: the sender's memory {path} cannot be opened: {error}. "
            "Fix: weight_sync.transport = gloo"
        ) from error


def host_id() -> str:
    """Return a text that is equal for processes that can share memory: same boot and same PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
