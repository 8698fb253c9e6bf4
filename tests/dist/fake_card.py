"""Memory of the CPU in place of a card's: torch shares its storages between processes, too."""

from __future__ import annotations

import json
import os

import torch

from gkd.errors import WeightSyncError
from gkd.weight_sync import group


def install(card: str = "card 0") -> None:
    """Let the groups of this process use CUDA IPC without a GPU, on a card of this name."""
    group.card_id = lambda device: card
    group.shared_handle = _handle
    group.copy_shared = _copy


def _handle(memory: torch.Tensor) -> bytes:
    fd, n_bytes = memory.untyped_storage()._share_fd_cpu_()
    return json.dumps([os.getpid(), fd, n_bytes]).encode()


def _copy(handle: bytes, buffer: torch.Tensor) -> None:
    pid, fd, n_bytes = json.loads(handle)
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as error:  # the sender has ended; a card's driver refuses its handle, too
        raise WeightSyncError(f"the sender's memory cannot be opened: {error}") from error
    try:
        storage = torch.UntypedStorage._new_shared_fd_cpu(own, n_bytes)
    finally:
        os.close(own)
    buffer.copy_(torch.empty(0, dtype=torch.uint8).set_(storage)[: buffer.numel()])
