"""Device memory of the sender that a process on the same card opens (CUDA IPC).

torch shares the storage. Its handle names the allocation, the place in it, and a counter of the processes that have it
open, from which the sender's allocator learns when the memory is free again. So each handle is opened exactly once. It
travels as JSON, because torch itself would pickle it.
"""

from __future__ import annotations

import json

import torch

from gkd.errors import WeightSyncError

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
        _, *parts = memory.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise WeightSyncError(f"weight_sync.transport = ipc: {error}. Fix: weight_sync.transport = gloo") from error
    return json.dumps([{"hex": part.hex()} if isinstance(part, bytes) else part for part in parts]).encode()


def copy_shared(handle: bytes, buffer: torch.Tensor) -> None:
    """Copy the first bytes of another process's storage on the same card, and close it; blocks until they are copied.

    Args:
        buffer: uint8, filled.

    Raises:
        WeightSyncError: the storage cannot be opened.
    """
    parts = [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in json.loads(handle)]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(buffer.device.index, *parts)
        buffer.copy_(torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(storage)[: buffer.numel()])
        torch.cuda.synchronize(buffer.device)
    except RuntimeError as error:
        raise WeightSyncError(
            f"weight_sync.transport = ipc: the sender's memory cannot be opened: {error}. "
            "Fix: weight_sync.transport = gloo"
        ) from error


def finish_copies(device: torch.device) -> None:
    """Wait for the copies that this thread's stream makes."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def collect(device: torch.device) -> None:
    """Let the allocator reuse memory that was shared and that no process has open any more."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()
