"""Move a role's states (parameters, gradients, optimizer states) from its device to host memory and back.

What moves is the storage under the tensors, which becomes empty and later full again. So every view of it that a model,
an optimizer or a communication buffer has stays what it is, and no reference is left that would keep the memory. On
CUDA the copies go through pinned memory on a stream of their own. Where the device is the CPU, all of this happens as
well, from host memory to host memory: it shows that nothing is lost or left behind, and says nothing of speed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from gkd.log import get_logger
from gkd.memory.host_buffer import SLAB_BYTES, HostBuffer

log = get_logger("memory")

MIB = 1 << 20
PARAMS, GRADS, OPTIMIZER = "params", "grads", "optimizer"
KINDS = (PARAMS, GRADS, OPTIMIZER)


@dataclass(slots=True)
class _Away:
    """A storage that is empty on the device."""

    storage: UntypedStorage
    n_bytes: int
    pieces: list[Tensor] | None  # its bytes on the host; None: not kept


@dataclass(slots=True)
class _Kind:
    """Where one kind of states is."""

    buffer: HostBuffer
    away: dict[int, _Away] = field(default_factory=dict)  # by the storage's address as an object


class Moves:
    """Copies that are under way; `wait` until they are done."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """Blocks until the copies have ended and the memory is released; harmless when called twice."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class States:
    """The states of one role in this process. Not thread-safe.

    Args:
        device: where they are computed with; tensors elsewhere are left alone.
        find: their live tensors by kind, asked anew at every move: optimizer states are made by the first step. A
            storage that is in several kinds belongs to the first of `KINDS`.
        before: called before anything is moved away, so that whoever still reads it has its copy.
        kept: kinds whose values are kept. Others come back as zeros: each step begins by zeroing the gradients.
    """

    def __init__(
        self,
        device: torch.device,
        find: Callable[[], Mapping[str, Sequence[Tensor]]],
        *,
        before: Callable[[], object] | None = None,
        kept: Collection[str] = (PARAMS, OPTIMIZER),
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        on_cuda = device.type == "cuda"
        self._device, self._find, self._before, self._kept = device, find, before, frozenset(kept)
        self._kinds = {kind: _Kind(HostBuffer(pinned=on_cuda, slab_bytes=slab_bytes)) for kind in KINDS}
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._moves: Moves | None = None
        self._stays: dict[int, int] = {}  # storage -> bytes that nobody here may release
        self._said = 0

    def offload(self, include: Sequence[str] | None = None, *, non_blocking: bool = False) -> Moves:
        """Move these kinds (None: all) to the host; what is there already stays there.

        Args:
            non_blocking: return while the copies are under way. Until `wait` is called on what is returned, or the next
                move begins, their memory is not released, and nobody may write into the states.

        Raises:
            ValueError: there is no such kind.
            MemoryError, RuntimeError: the host has no memory for them. They are all where they were.
        """
        kinds = _checked(include)
        self.settle()
        if self._before is not None:
            self._before()
        self._say_what_stays()
        # All memory on the host before anything moves.
        moving: list[tuple[str, _Away]] = []
        marks = {kind: self._kinds[kind].buffer.mark for kind in kinds}
        try:
            for kind, storage in self._on_device(kinds):
                pieces = self._kinds[kind].buffer.take(storage.nbytes()) if kind in self._kept else None
                moving.append((kind, _Away(storage, storage.nbytes(), pieces)))
        except (MemoryError, RuntimeError):
            for kind, mark in marks.items():
                self._kinds[kind].buffer.mark = mark
            raise
        self._copy([away for _, away in moving], to_host=True)

        def release() -> None:
            if self._stream is not None:
                self._stream.synchronize()
            for kind, away in moving:
                away.storage.resize_(0)
                self._kinds[kind].away[away.storage._cdata] = away

        return self._begun(release, non_blocking)

    def reload(self, include: Sequence[str] | None = None, *, non_blocking: bool = False) -> Moves:
        """Bring these kinds (None: all) back to the device; what is there already stays there.

        Args:
            non_blocking: return while the copies are under way. What is computed on the current stream from now on
                waits for them by itself; the host does not.

        Raises:
            ValueError: there is no such kind.
            torch.OutOfMemoryError, RuntimeError: the device has no memory for them. They are all where they were.
        """
        kinds = _checked(include)
        self.settle()
        coming = [away for kind in kinds for away in self._kinds[kind].away.values()]
        try:
            for away in coming:
                away.storage.resize_(away.n_bytes)
        except RuntimeError:
            for away in coming:
                away.storage.resize_(0)
            raise
        self._copy(coming, to_host=False)
        for kind in kinds:
            self._kinds[kind].away.clear()

        def finish() -> None:
            if self._stream is not None:
                self._stream.synchronize()
            for kind in kinds:
                self._kinds[kind].buffer.clear()

        return self._begun(finish, non_blocking)

    def settle(self) -> None:
        """Waits for the copies that are under way."""
        moves, self._moves = self._moves, None
        if moves is not None:
            moves.wait()

    def away(self) -> list[str]:
        """The kinds of which something is not on the device."""
        self.settle()
        return [kind for kind in KINDS if self._kinds[kind].away]

    def device_bytes(self) -> dict[str, int]:
        """On the device, by kind."""
        self.settle()
        sizes = dict.fromkeys(KINDS, 0)
        for kind, storage in self._on_device(KINDS):
            sizes[kind] += storage.nbytes()
        return sizes

    def allocated(self) -> int:
        """Bytes on the device, of all kinds."""
        return sum(self.device_bytes().values())

    def host_bytes(self) -> int:
        """Of the buffers on the host, whether they hold something now or not."""
        return sum(kind.buffer.n_bytes for kind in self._kinds.values())

    def _on_device(self, kinds: Sequence[str]) -> Iterator[tuple[str, UntypedStorage]]:
        """(kind, storage) of all that is there, each once."""
        found, seen = self._find(), set[int]()
        for kind in KINDS:
            for tensor in found.get(kind, ()):
                storage = _local(tensor).untyped_storage()
                known = storage._cdata in seen
                seen.add(storage._cdata)
                if kind in kinds and not known and tensor.device.type == self._device.type and storage.nbytes():
                    if storage.resizable():
                        yield kind, storage
                    else:
                        self._stays[storage._cdata] = storage.nbytes()

    def _say_what_stays(self) -> None:
        """What lies in somebody else's memory, such as Ray's object store, is not ours to release."""
        self._stays.clear()
        n_moving = sum(storage.nbytes() for _, storage in self._on_device(KINDS))
        n_bytes = sum(self._stays.values())
        if n_bytes != self._said:
            text = "%.1f MiB of states lie in memory of others and stay where they are; %.1f MiB move"
            log.warning(text, n_bytes / MIB, n_moving / MIB)
            self._said = n_bytes

    def _copy(self, moving: Sequence[_Away], *, to_host: bool) -> None:
        """Every storage to or from its pieces; on CUDA only begun, in the order of the streams."""
        if self._stream is None:
            for away in moving:
                _copy_one(away, self._device, to_host=to_host)
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for away in moving:
                _copy_one(away, self._device, to_host=to_host)
        if not to_host:
            current.wait_stream(self._stream)

    def _begun(self, finish: Callable[[], None], non_blocking: bool) -> Moves:
        self._moves = moves = Moves(finish)
        if not non_blocking:
            self.settle()
        return moves


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The states that it has made so far; counters, of which every parameter may have one, stay where they are."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in map(_local, values) if isinstance(value, Tensor) and value.ndim]


def _local(value: Any) -> Any:
    """This rank's part of a sharded tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def _copy_one(away: _Away, device: torch.device, *, to_host: bool) -> None:
    run = torch.empty(0, dtype=torch.uint8, device=device).set_(away.storage)
    if away.pieces is None:
        if not to_host:
            run.zero_()
        return
    at = 0
    for piece in away.pieces:
        part = run[at : at + len(piece)]
        source, target = (part, piece) if to_host else (piece, part)
        target.copy_(source, non_blocking=True)
        at += len(piece)


def _checked(include: Sequence[str] | None) -> tuple[str, ...]:
    wrong = sorted(set(include or ()) - set(KINDS))
    if wrong or isinstance(include, str):
        raise ValueError(f"there are no states {include!r}; give a list of some of {', '.join(KINDS)}, or None for all")
    return KINDS if include is None else tuple(kind for kind in KINDS if kind in include)
