"""Copy a rank's state to host memory for a checkpoint, while the next batch runs forward and backward.

A save that training waits for needs no copy: the file is written from the live states.

Weights and moments do not change between two optimizer steps. So training continues during a copy, and only the next
optimizer step waits for it. The pieces are contiguous in slabs of one size, so that the file is written in a few long
runs of bytes and not in thousands of small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gkd.actor.common.shards import Piece
from gkd.memory.host_buffer import SLAB_BYTES, HostBuffer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's state, as of the call that made the snapshot.

    `meta` is JSON data with `step` and `world_size`, the same on all ranks of a checkpoint.
    """

    pieces: Sequence[Piece]  # in host memory, contiguous in each slab; or the live states
    meta: Mapping[str, Any]
    rng: Mapping[str, Tensor]  # [n] uint8, this rank's generators
    memory: HostCopies
    buffer: HostBuffer  # the memory of the pieces, unless they are live
    wait: Callable[[], object]  # blocks until the pieces have their values; do not read them before
    is_live: bool = False  # nothing was copied
    joined: Snapshot | None = None  # its pieces are included above, in memory of its own

    def release(self) -> None:
        """Let the next snapshot reuse the memory. Call it after `wait`; the pieces must not be read afterwards."""
        self.memory.give_back(self.buffer)
        if self.joined is not None:
            self.joined.release()

    def join(self, other: Snapshot) -> Snapshot:
        """Return both as one snapshot for one file; `other` adds pieces and meta data, but no generators."""

        def wait() -> None:
            self.wait()
            other.wait()

        pieces = [*self.pieces, *other.pieces]
        meta = {**self.meta, **other.meta}
        return replace(self, pieces=pieces, meta=meta, wait=wait, joined=other)


class HostCopies:
    """Make snapshots, and reuse the memory of the last released one, because new pages cost more than the copy.

    Args:
        device: of the live tensors; with CUDA, the memory is pinned and a separate stream copies.
        slab_bytes: size of the allocations, a power of two.
    """

    def __init__(self, device: torch.device, *, slab_bytes: int = SLAB_BYTES) -> None:
        self._slab_bytes = slab_bytes
        self._free: HostBuffer | None = None
        self._settle: Callable[[], object] = _nothing
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "snapshot")  # starts with the first copy

    def snapshot(
        self, live: Sequence[Piece], meta: Mapping[str, Any], rng: Mapping[str, Tensor], *, copies: bool = True
    ) -> Snapshot:
        """Start to copy all of `live` to the host; the live tensors may change after `settle`. Not a collective.

        Args:
            copies: False: the pieces are the live tensors, which may not change before `Snapshot.release`, and the
                memory of the last copy is freed.

        Raises:
            MemoryError, RuntimeError: there is not enough host memory, see `HostBuffer.take`.
        """
        self.settle()
        kept = self._free if copies else None
        self._free = None
        buffer = kept or HostBuffer(pinned=self._stream is not None, slab_bytes=self._slab_bytes)
        buffer.clear()
        live = sorted(live, key=lambda piece: -piece.data.itemsize)  # the largest items first: all are aligned
        if not copies:
            return Snapshot(live, dict(meta), dict(rng), self, buffer, _nothing, is_live=True)
        pieces, sources = self._laid_out(live, buffer.take(sum(piece.data.nbytes for piece in live)))
        targets = [piece.data for piece in pieces]
        wait: Callable[[], object] = _nothing
        if targets:
            wait = self._copy(targets, sources) if self._stream is None else self._copy_cuda(targets, sources)
        return Snapshot(pieces, dict(meta), dict(rng), self, buffer, wait)

    def settle(self) -> None:
        """Wait until the last snapshot has copied the live tensors. Call it before they change.

        On CUDA only the current stream waits.
        """
        self._settle()
        self._settle = _nothing

    def give_back(self, buffer: HostBuffer) -> None:
        self._free = buffer

    def _laid_out(self, live: Sequence[Piece], slabs: Sequence[Tensor]) -> tuple[list[Piece], list[Tensor]]:
        """Return (pieces in `slabs`, the source of each); a piece that crosses the end of a slab is split."""
        pieces = []
        sources = []
        position = 0
        for piece in live:
            size = piece.data.itemsize
            done = 0
            while done < piece.data.numel():
                number, offset = divmod(position, self._slab_bytes)
                n = min(piece.data.numel() - done, (self._slab_bytes - offset) // size)
                target = slabs[number][offset : offset + n * size].view(piece.data.dtype)
                pieces.append(Piece(piece.name, piece.kind, piece.part, piece.start + done, target))
                sources.append(piece.data[done : done + n])
                done = done + n
                position = position + n * size
        return pieces, sources

    def _copy(self, targets: list[Tensor], sources: list[Tensor]) -> Callable[[], object]:
        # One call for all: returning to Python for every piece would interrupt the training thread each time.
        copied = self._thread.submit(torch._foreach_copy_, targets, sources)
        self._settle = copied.result
        return copied.result

    def _copy_cuda(self, targets: list[Tensor], sources: list[Tensor]) -> Callable[[], object]:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        copied = self._stream.record_event()

        def settle() -> None:
            # This closure also keeps the sources alive until then.
            torch.cuda.current_stream(sources[0].device).wait_event(copied)

        self._settle = settle
        return copied.synchronize


def _nothing() -> None:
    """Return at once: there is nothing to wait for."""
