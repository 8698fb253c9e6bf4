"""Memory of the sender that engines on the same host or card open, and the last version that is kept in it.

Host memory is an anonymous file (`memfd_create`) that others open as `/proc/PID/fd/N`. It has no name that could be
left behind: the system frees it with the last process that uses it, also after SIGKILL. The size of /dev/shm does not
matter.

Device memory is opened through CUDA IPC. torch shares the storage. Its handle names the allocation, the place in it,
and a counter of the processes that have it open, from which the sender's allocator learns when the memory is free
again. So each handle is opened exactly once. It travels as JSON, because torch itself would pickle it.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from gkd.errors import WeightSyncError
from gkd.log import get_logger
from gkd.memory.host_buffer import page_lock, page_unlock
from gkd.weight_sync.buckets import Bucket, Content, layout

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


class KeptVersion:
    """The buckets of the last version by content. Their memory is reused by the next version."""

    def __init__(self) -> None:
        self._contents: dict[Content, tuple[list[Bucket], Segment]] = {}
        self._complete: set[Content] = set()

    @contextmanager
    def replacing(self, content: Content, buckets: Sequence[Bucket], *, pinned: bool) -> Iterator[Segment]:
        """Yield the memory of the buckets, one behind the other, to be filled in this context.

        Args:
            pinned: the buckets are copied from a GPU.

        After an error the content is incomplete. Raises WeightSyncError: there is not enough memory.
        """
        self._complete.discard(content)
        if content not in self._contents or self._contents[content][0] != list(buckets):
            self._contents.pop(content, None)  # free it first
            self._contents[content] = list(buckets), Segment(layout(buckets)[1], pinned=pinned)
        yield self._contents[content][1]
        self._complete.add(content)

    def complete(self, content: Content) -> tuple[list[Bucket], Segment]:
        """Return the buckets and their memory. Raises WeightSyncError: they are not complete."""
        if content not in self._complete:
            raise WeightSyncError(f"no complete version of the {content} weights is kept on this rank")
        return self._contents[content]


HANDLE_BYTES = 1024  # room for a handle: two of CUDA with about 64 bytes each, and the name of torch's counter


def card_id(device: torch.device) -> str:
    """Return a text that is equal for processes on the same card, whatever number it has in each."""
    return str(torch.cuda.get_device_properties(device).uuid)


def shared_handle(memory: torch.Tensor) -> bytes:
    """Return what one other process needs to open the storage of a tensor on a GPU, which it fills from the first byte.

    Raises:
        WeightSyncError: CUDA does not share it.
    """
    try:
        _, *fields = memory.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise WeightSyncError(f"weight_sync.transport = ipc: {error}. Fix: weight_sync.transport = gloo") from error
    return json.dumps([{"hex": part.hex()} if isinstance(part, bytes) else part for part in fields]).encode()


def copy_shared(handle: bytes, buffer: torch.Tensor) -> None:
    """Copy the first bytes of another process's storage on the same card, and close it; blocks until they are copied.

    Args:
        buffer: uint8, filled.

    Raises:
        WeightSyncError: the storage cannot be opened.
    """
    fields = [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in json.loads(handle)]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(buffer.device.index, *fields)
        buffer.copy_(torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(storage)[: buffer.numel()])
        torch.cuda.synchronize(buffer.device)
    except RuntimeError as error:
        raise WeightSyncError(
            f"weight_sync.transport = ipc: the sender's memory cannot be opened: {error}. "
            "Fix: weight_sync.transport = gloo"
        ) from error
