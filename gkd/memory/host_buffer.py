"""Host memory for offloaded states and for checkpoints, reused: allocating new pages takes longer than the copy."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from gkd.memory.oom import PINNED, is_out_of_memory

# Torch rounds pinned memory up to a power of two: 17 GiB in one tensor would use 32. With slabs only the end of the
# last one is unused.
SLAB_BYTES = 64 << 20
_ALIGN = 64  # bytes; a multiple of every item size


class HostBuffer:
    """A stack of byte ranges over one or more slabs.

    Args:
        pinned: page-locked, so that a GPU copies asynchronously.
        slab_bytes: size of each slab, a power of two.
    """

    def __init__(self, *, pinned: bool, slab_bytes: int = SLAB_BYTES) -> None:
        self._pinned = pinned
        self._slab_bytes = slab_bytes
        self._slabs: list[Tensor] = []
        self.mark = 0  # bytes in use from the start; setting it back releases the ranges after it

    @property
    def n_bytes(self) -> int:
        """Bytes of all slabs, used or not."""
        return len(self._slabs) * self._slab_bytes

    def take(self, n_bytes: int) -> list[Tensor]:
        """Return [n] uint8 views of `n_bytes` together, valid until `clear`; all but the first and last fill a slab.

        Raises:
            MemoryError: not enough page-locked memory; no range is taken. CUDA's own error is the same as for GPU
                memory.
            RuntimeError: not enough pageable memory; no range is taken.
        """
        start = -(-self.mark // _ALIGN) * _ALIGN
        missing = -(-(start + n_bytes) // self._slab_bytes) - len(self._slabs)
        slabs: list[Tensor] = []
        try:
            while len(slabs) < missing:
                slabs.append(torch.empty(self._slab_bytes, dtype=torch.uint8, pin_memory=self._pinned))
        except RuntimeError as error:
            if not self._pinned or not is_out_of_memory(error):
                raise
            count = f"{missing} pieces of {self._slab_bytes} bytes, of which {len(slabs)} were allocated"
            raise MemoryError(f"Unable to allocate {missing * self._slab_bytes} bytes of {PINNED} ({count})") from error
        self._slabs += slabs
        pieces = []
        position = start
        end = start + n_bytes
        while position < end:
            number, offset = divmod(position, self._slab_bytes)
            n = min(end - position, self._slab_bytes - offset)
            pieces.append(self._slabs[number][offset : offset + n])
            position += n
        self.mark = end
        return pieces

    def clear(self) -> None:
        """Release all ranges and keep the memory for reuse."""
        self.mark = 0


def page_lock(block: Tensor) -> None:
    """Register the memory of a contiguous tensor with CUDA, so that copies from and to a GPU are fast and asynchronous.

    It must stay mapped until it is unlocked, or until the process ends.

    Raises:
        MemoryError: CUDA refuses it; CUDA's own message would be classified as another error.
    """
    try:
        pin_memory(block.data_ptr(), block.nbytes)
    except RuntimeError as error:
        with suppress(RuntimeError):  # clear CUDA's last error, which torch would report at the next kernel
            torch.ones(1, device="cuda")
        raise MemoryError(f"Unable to allocate {block.nbytes} bytes of {PINNED} (in one block; {error})") from error


def page_unlock(block: Tensor) -> None:
    """Undo `page_lock`. Copies from and to the memory must have ended."""
    unpin_memory(block.data_ptr())
