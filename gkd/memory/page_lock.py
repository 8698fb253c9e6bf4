"""Page-lock host memory that CUDA did not allocate, so that copies from and to a GPU are fast and asynchronous.

Such memory must stay mapped until it is unlocked, or until the process ends.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from gkd.memory.oom import PINNED


def page_lock(block: Tensor) -> None:
    """Register the memory of a contiguous tensor with CUDA.

    Raises:
        MemoryError: CUDA refuses it; CUDA's own message would be classified as another error.
    """
    try:
        pin_memory(block.data_ptr(), block.nbytes)
    except RuntimeError as error:
        _clear_error()
        raise MemoryError(f"Unable to allocate {block.nbytes} bytes of {PINNED} (in one block; {error})") from error


def page_unlock(block: Tensor) -> None:
    """Undo `page_lock`. Copies from and to the memory must have ended."""
    unpin_memory(block.data_ptr())


def _clear_error() -> None:
    """Clear CUDA's last error, which torch leaves behind here and would report at the next kernel."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
