"""Move a role's states (parameters, gradients, optimizer states) from its device to host memory and back.

The storage under the tensors is resized to zero and back. So every view of it in a model, an optimizer or a
communication buffer stays valid, and no reference keeps the memory. On CUDA the copies use pinned memory and a stream
of their own. On the CPU the same code moves states from host memory to host memory, which tests that nothing is lost or
left behind, and not the speed. There nothing may call Tensor.numpy() on a state: its storage could never be resized
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from gkd.log import get_logger
from gkd.memory.host_buffer import SLAB_BYTES, HostBuffer

log = get_logger("memory")

MIB = 1 << 20
PARAMS = "params"
GRADS = "grads"
OPTIMIZER = "optimizer"
KINDS = (PARAMS, GRADS, OPTIMIZER)
_KEPT = (PARAMS, OPTIMIZER)  # gradients are zero after a reload: each step begins by zeroing them


@dataclass(slots=True)
class _Away:
    """A storage that is offloaded: empty on the device."""

    storage: UntypedStorage
    n_bytes: int
    pieces: list[Tensor] | None  # its bytes in host memory; None: not kept


@dataclass(slots=True)
class _Kind:
    """The offloaded storages of one kind of states, and their host memory."""

    buffer: HostBuffer
    away: dict[int, _Away] = field(default_factory=dict)  # address of the storage object -> its copy


class States:
    """The states of one role in this process. Not thread-safe.

    Args:
        device: the device of the computation; tensors on other devices do not move.
        find: returns the live tensors by kind. Called at every move, because the first step creates optimizer states. A
            storage in several kinds belongs to the first of `KINDS`.
        before: called before an offload, to complete copies that still read the states.
    """

    def __init__(
        self,
        device: torch.device,
        find: Callable[[], Mapping[str, Sequence[Tensor]]],
        *,
        before: Callable[[], object] | None = None,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        on_cuda = device.type == "cuda"
        self._device = device
        self._find = find
        self._before = before
        self._kinds = {kind: _Kind(HostBuffer(pinned=on_cuda, slab_bytes=slab_bytes)) for kind in KINDS}
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._fixed: dict[int, int] = {}  # storage -> bytes that cannot be released here
        self._logged = 0
        self._moved_bytes = {"to_host": 0, "to_device": 0}

    def offload_states(self, include: Sequence[str] | None = None) -> None:
        """Move these kinds (None: all) to host memory and release theirs on the device; states on the host stay there.

        Raises:
            ValueError: unknown kind.
            MemoryError, RuntimeError: not enough host memory; no state has moved.
        """
        kinds = _checked(include)
        if self._before is not None:
            self._before()
        self._log_fixed_storages()
        # All host memory is allocated before the first copy.
        moving: list[tuple[str, _Away]] = []
        marks = {kind: self._kinds[kind].buffer.mark for kind in kinds}
        try:
            for kind, storage in self._on_device(kinds):
                pieces = self._kinds[kind].buffer.take(storage.nbytes()) if kind in _KEPT else None
                moving.append((kind, _Away(storage, storage.nbytes(), pieces)))
        except (MemoryError, RuntimeError):
            for kind, mark in marks.items():
                self._kinds[kind].buffer.mark = mark
            raise
        self._copy([away for _, away in moving], to_host=True)
        for kind, away in moving:
            away.storage.resize_(0)
            self._kinds[kind].away[away.storage._cdata] = away

    def reload_states(self, include: Sequence[str] | None = None) -> None:
        """Move these kinds (None: all) back to the device; states that are there stay there.

        Raises:
            ValueError: unknown kind.
            torch.OutOfMemoryError, RuntimeError: not enough device memory; no state has moved.
        """
        kinds = _checked(include)
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
            self._kinds[kind].buffer.clear()

    def away(self) -> list[str]:
        """Return the kinds with an offloaded storage."""
        return [kind for kind in KINDS if self._kinds[kind].away]

    def device_bytes(self) -> dict[str, int]:
        """Return the bytes on the device by kind."""
        sizes = dict.fromkeys(KINDS, 0)
        for kind, storage in self._on_device(KINDS):
            sizes[kind] += storage.nbytes()
        return sizes

    def allocated_bytes(self) -> int:
        """Return the bytes on the device of all kinds."""
        return sum(self.device_bytes().values())

    def host_bytes(self) -> int:
        """Return the bytes of the host buffers, in use or not."""
        return sum(kind.buffer.n_bytes for kind in self._kinds.values())

    def take_moved_bytes(self) -> dict[str, int]:
        """Return and reset the bytes copied `to_host` and `to_device`."""
        moved = self._moved_bytes
        self._moved_bytes = dict.fromkeys(self._moved_bytes, 0)
        return moved

    def _on_device(self, kinds: Sequence[str]) -> Iterator[tuple[str, UntypedStorage]]:
        """Yield (kind, storage) for each storage on the device, once."""
        tensors = self._find()
        seen = set[int]()
        for kind in KINDS:
            for tensor in tensors.get(kind, ()):
                storage = _local(tensor).untyped_storage()
                is_repeated = storage._cdata in seen
                seen.add(storage._cdata)
                if kind in kinds and not is_repeated and tensor.device.type == self._device.type and storage.nbytes():
                    if storage.resizable():
                        yield kind, storage
                    else:
                        self._fixed[storage._cdata] = storage.nbytes()

    def _log_fixed_storages(self) -> None:
        """Log the states in memory of another owner, such as Ray's object store, which cannot be released here."""
        self._fixed.clear()
        n_moving = sum(storage.nbytes() for _, storage in self._on_device(KINDS))
        n_bytes = sum(self._fixed.values())
        if n_bytes != self._logged:
            text = "%.1f MiB of states are in memory of another owner and stay on the device; %.1f MiB move"
            log.warning(text, n_bytes / MIB, n_moving / MIB)
            self._logged = n_bytes

    def _copy(self, moving: Sequence[_Away], *, to_host: bool) -> None:
        """Copy every storage to or from its host memory; blocks until the copies are complete."""
        n_bytes = sum(away.n_bytes for away in moving if away.pieces is not None)
        self._moved_bytes["to_host" if to_host else "to_device"] += n_bytes
        if self._stream is None:
            for away in moving:
                _copy_one(away, self._device, to_host=to_host)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for away in moving:
                _copy_one(away, self._device, to_host=to_host)
        self._stream.synchronize()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the states that exist so far, without scalar counters, which stay on the device."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in map(_local, values) if isinstance(value, Tensor) and value.ndim]


def _local(value: Any) -> Any:
    """Return this rank's part of a sharded tensor, or the value itself."""
    return value.to_local() if isinstance(value, DTensor) else value


def _copy_one(away: _Away, device: torch.device, *, to_host: bool) -> None:
    run = torch.empty(0, dtype=torch.uint8, device=device).set_(away.storage)
    if away.pieces is None:
        if not to_host:
            run.zero_()
        return
    offset = 0
    for piece in away.pieces:
        part = run[offset : offset + len(piece)]
        source, target = (part, piece) if to_host else (piece, part)
        target.copy_(source, non_blocking=True)
        offset += len(piece)


def _checked(include: Sequence[str] | None) -> tuple[str, ...]:
    wrong = sorted(set(include or ()) - set(KINDS))
    if wrong or isinstance(include, str):
        raise ValueError(
            f"include = {include!r}: not a list of kinds. Fix: list some of {', '.join(KINDS)}, or give None for all"
        )
    return KINDS if include is None else tuple(kind for kind in KINDS if kind in include)
