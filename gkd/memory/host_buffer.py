"""Host memory that states are moved into, kept from one move to the next: fresh pages cost more than the copy."""

from __future__ import annotations

import torch
from torch import Tensor

from gkd.memory.oom import PINNED, is_out_of_memory

# Torch rounds pinned memory up to a power of two: 17 GiB in one tensor would take 32. All that is lost here is the end
# of the last slab.
SLAB_BYTES = 64 << 20
_ALIGN = 64  # bytes; a multiple of every item size


def host_slabs(count: int, n_bytes: int, *, pinned: bool) -> list[Tensor]:
    """`count` x [n_bytes] uint8 of host memory.

    Raises:
        MemoryError: there is not that much page-locked memory. CUDA says "out of memory" as it does of the GPU's.
        RuntimeError: there is not that much other memory.
    """
    slabs: list[Tensor] = []
    try:
        while len(slabs) < count:
            slabs.append(torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pinned))
    except RuntimeError as error:
        if not pinned or not is_out_of_memory(error):
            raise
        pieces = f"{count} pieces of {n_bytes} bytes, of which {len(slabs)} could be had"
        raise MemoryError(f"Unable to allocate {count * n_bytes} bytes of {PINNED} ({pieces})") from error
    return slabs


class HostBuffer:
    """Runs of bytes one after the other, over as many slabs as it takes.

    Args:
        pinned: page-locked, so that a GPU copies to and from it by itself.
        slab_bytes: memory is taken in pieces of this size, a power of two.
    """

    def __init__(self, *, pinned: bool, slab_bytes: int = SLAB_BYTES) -> None:
        self._pinned, self._slab_bytes = pinned, slab_bytes
        self._slabs: list[Tensor] = []
        self.mark = 0  # bytes from the start that are taken; whoever sets it back gives up what came after

    @property
    def n_bytes(self) -> int:
        """Of all slabs, used or not."""
        return len(self._slabs) * self._slab_bytes

    def take(self, n_bytes: int) -> list[Tensor]:
        """[n] uint8 pieces that are `n_bytes` together; they keep their place until `clear`.

        Raises MemoryError, RuntimeError: the host has no such memory; nothing is taken. See `host_slabs`.
        """
        start = -(-self.mark // _ALIGN) * _ALIGN
        missing = -(-(start + n_bytes) // self._slab_bytes) - len(self._slabs)
        self._slabs += host_slabs(missing, self._slab_bytes, pinned=self._pinned)
        pieces, at, end = [], start, start + n_bytes
        while at < end:
            number, offset = divmod(at, self._slab_bytes)
            n = min(end - at, self._slab_bytes - offset)
            pieces.append(self._slabs[number][offset : offset + n])
            at += n
        self.mark = end
        return pieces

    def clear(self) -> None:
        """All pieces may be given out again; the memory stays."""
        self.mark = 0

    def free(self) -> None:
        """Also the memory goes."""
        self._slabs, self.mark = [], 0
