"""Connect one sender of weights with the workers of all rollout engines, and move a bucket's bytes between them.

A group is a bare ProcessGroup over a TCPStore of its own. It is not registered as a default group, so it can span a
Megatron process and a vLLM process that have default groups of their own. There is one group for each pipeline stage.
Its rank 0 is the stage's exporting rank, and the others are all workers of all rollout engines. With CUDA IPC there is
one for each card: an exporting rank and the one worker on its card.

Transports differ only in how the bytes of a bucket travel: `_Broadcast`, `_SharedMemory`, `_CudaIpc`. Each sends the
bucket's checksum, over gloo.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.config.schema_rollout import AUTO, GLOO, IPC, NCCL, SHARED_MEMORY
from gkd.errors import TransferCutOff, WeightSyncError
from gkd.weight_sync.buckets import checksum
from gkd.weight_sync.segment import (
    HANDLE_BYTES,
    Segment,
    SegmentId,
    attached,
    card_id,
    copy_shared,
    host_id,
    shared_handle,
)

Place = tuple[Segment, int]  # a segment, and the offset of a bucket in it


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Arguments of one member for joining a group: the address of its store, and the member's rank.

    Attributes:
        transport: "auto": shared_memory if all members are on one host, else gloo.
        timeout_s: of one bucket.
        join_s: until all members have arrived.
        keeps: the sender keeps what it sends for engines that are started again; with CUDA IPC one sender does.
    """

    transport: str
    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float
    join_s: float
    keeps: bool = True


class TransferGroup:
    """One member of a group. The constructor blocks until all members have joined. Raises WeightSyncError.

    Args:
        store: the group's store, for rank 0 of a group whose store listens already.

    Attributes:
        transport: GLOO, NCCL, SHARED_MEMORY or IPC.
        own_device: where this member has its weights.
        device: where the buckets are; host memory unless with NCCL or IPC.
    """

    def __init__(self, spec: GroupSpec, device: torch.device, store: dist.TCPStore | None = None) -> None:
        self.spec = spec
        self.own_device = device
        self._gloo: Any = None
        self._nccl: Any = None
        join_time = timedelta(seconds=spec.join_s)
        timeout = timedelta(seconds=spec.timeout_s)
        try:
            if store is None:
                store = dist.TCPStore(
                    spec.host, spec.port, is_master=spec.rank == 0, timeout=join_time, wait_for_workers=False
                )
            self._store = store
            self._store.set_timeout(join_time)
            # Equal for members that can share memory.
            place = f"{host_id()} {card_id(device)}" if spec.transport == IPC else host_id()
            self._store.set(f"host {spec.rank}", place)
            hosts = [self._store.get(f"host {rank}") for rank in range(spec.world_size)]
            self.transport = self._resolved(hosts)
            self._way = _TRANSPORTS[self.transport]()
            self.device = device if self.transport in (NCCL, IPC) else torch.device("cpu")
            # Its constructor waits for the members, too: one may have died since it wrote its place.
            self._gloo = dist.ProcessGroupGloo(
                dist.PrefixStore("gloo", self._store), spec.rank, spec.world_size, join_time
            )
            self._gloo._set_default_timeout(timeout)
            if self.transport == NCCL:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                nccl_store = dist.PrefixStore("nccl", self._store)
                self._nccl = dist.ProcessGroupNCCL(nccl_store, spec.rank, spec.world_size, options)
                # NCCL connects the members only at the first collective.
                self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))
        except (RuntimeError, dist.DistError) as error:
            raise WeightSyncError(
                f"rank {spec.rank} of {spec.world_size} could not join the weight-sync group at "
                f"{spec.host}:{spec.port} ({spec.transport}) within {spec.join_s:.0f} s: {error}"
            ) from error

    @property
    def shares_memory(self) -> bool:
        return self.transport == SHARED_MEMORY

    def send_bucket(self, buffer: Tensor, on_host: Tensor | None, place: Place | None) -> None:
        """Send one bucket; blocks until it is sent, available in shared memory, or copied by the worker on this card.

        `on_host` has the bytes then, so the bucket may be overwritten.

        Args:
            buffer: its bytes, on `device`.
            on_host: host memory with the same bytes, or that gets them; None: no copy is needed.
            place: where the bytes are in shared memory; None: they are not there.
        """
        copy = on_host if on_host is not None and on_host.data_ptr() != buffer.data_ptr() else None
        self._way.send(self, buffer, copy, place)

    def receive_bucket(self, n_bytes: int, buffer: Tensor | None) -> Tensor:
        """Receive one bucket into `buffer`, or where the sender has it. Return its bytes.

        Args:
            buffer: [>= n_bytes] uint8 on `device`; None with shared memory.

        Raises:
            WeightSyncError: the bytes differ from those that were sent, or the connection is lost.
        """
        received, expected = self._way.receive(self, n_bytes, buffer)
        if _signed(checksum(received)) != expected:
            raise WeightSyncError(f"a bucket of {n_bytes} bytes was damaged on its way ({self.transport})")
        return received

    def close(self) -> None:
        """Leave the group without waiting for the others. Their calls fail.

        gloo closes its connections when nothing refers to the group any more; its `abort` leaves them open. A thread
        of this process that moves a bucket meanwhile finishes it first.
        """
        if self._nccl is not None:
            self._nccl.abort()
        self._gloo = self._nccl = None

    def _resolved(self, places: list[bytes]) -> str:
        chosen = self.spec.transport
        remote = [rank for rank, place in enumerate(places) if place != places[0]]
        if chosen == AUTO:
            return GLOO if remote else SHARED_MEMORY
        if chosen in (SHARED_MEMORY, IPC) and remote:
            where = "card" if chosen == IPC else "host"
            raise WeightSyncError(
                f"weight_sync.transport = {chosen}: members {remote} of the group are not on the sender's {where}. "
                "Fix: use auto or gloo"
            )
        return chosen

    def broadcast(self, buffer: Tensor, *, on_host: bool = False) -> None:
        """Broadcast from rank 0, in place; blocks until the data is received (gloo) or enqueued on a stream (nccl).

        Args:
            on_host: use gloo, also if the buckets are sent by NCCL.

        After an error the connections are closed, so that the other members fail, too, instead of waiting for their
        time-out.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._call("broadcast", [buffer], options, on_host=on_host)

    def numbers(self, numbers: list[int]) -> list[int]:
        """Return the sender's numbers; a receiver passes as many zeros. 64 bits each, signed. Errors as `broadcast`."""
        tensor = torch.tensor([_signed(number) for number in numbers], dtype=torch.int64)
        self.broadcast(tensor, on_host=True)
        sent: list[int] = tensor.tolist()
        return sent

    def meet(self) -> None:
        """Wait until all members call this. Errors as for `broadcast`."""
        self._call("barrier", dist.BarrierOptions(), on_host=True)

    def _call(self, name: str, *args: Any, on_host: bool) -> None:
        group = self._gloo if on_host else self._nccl or self._gloo
        who = f"rank {self.spec.rank} of {self.spec.world_size}"
        if group is None:
            raise TransferCutOff(f"{who} has left the weight-sync group")
        try:
            getattr(group, name)(*args).wait()
        except RuntimeError as error:
            del group  # the traceback keeps this frame
            self.close()
            raise TransferCutOff(f"weight-sync {name} failed on {who}: {error}") from error


def _signed(number: int) -> int:
    """Return an unsigned 64-bit number as the signed one with the same bits."""
    return number - (1 << 64) if number >= 1 << 63 else number


class _Broadcast:
    """Broadcast the bucket, by NCCL or gloo, and then its checksum."""

    def send(self, group: TransferGroup, buffer: Tensor, copy: Tensor | None, place: Place | None) -> None:
        """Send a bucket. Arguments as for `TransferGroup.send_bucket`.

        Args:
            copy: host memory that gets the bytes, too; None: no copy is needed.
        """
        if copy is not None:
            copy.copy_(buffer)  # first: NCCL's broadcast never ends if a member dies; the checksum's then fails
        expected = checksum(buffer)
        group.broadcast(buffer)
        group.numbers([expected])

    def receive(self, group: TransferGroup, n_bytes: int, buffer: Tensor | None) -> tuple[Tensor, int]:
        """Return the bytes of a bucket, and the checksum that the sender has of it, as a signed number."""
        assert buffer is not None
        group.broadcast(buffer[:n_bytes])
        return buffer[:n_bytes], group.numbers([0])[0]


class _SharedMemory:
    """Send the place of the bucket in the sender's memory, which the receiver opens."""

    def __init__(self) -> None:
        self._attached: dict[SegmentId, Tensor] = {}

    def send(self, group: TransferGroup, buffer: Tensor, copy: Tensor | None, place: Place | None) -> None:
        assert place is not None and copy is None
        segment, offset = place
        group.numbers([checksum(buffer), *astuple(segment.id), offset])

    def receive(self, group: TransferGroup, n_bytes: int, buffer: Tensor | None) -> tuple[Tensor, int]:
        expected, *numbers, offset = group.numbers([0] * 6)
        segment = SegmentId(*numbers)
        if segment not in self._attached:
            self._attached[segment] = attached(segment)
        return self._attached[segment][offset : offset + n_bytes], expected


class _CudaIpc:
    """Send the handle of the bucket in the sender's device memory, which the worker on the same card opens.

    The sender waits until the worker has copied the bucket; a copy in the sender's host memory is made meanwhile.
    """

    def send(self, group: TransferGroup, buffer: Tensor, copy: Tensor | None, place: Place | None) -> None:
        group.numbers([checksum(buffer)])
        handle = torch.frombuffer(bytearray(shared_handle(buffer).ljust(HANDLE_BYTES)), dtype=torch.uint8)
        group.broadcast(handle, on_host=True)
        if copy is not None:
            copy.copy_(buffer, non_blocking=True)
        group.meet()
        if group.device.type == "cuda":
            torch.cuda.current_stream(group.device).synchronize()  # until the copy is made

    def receive(self, group: TransferGroup, n_bytes: int, buffer: Tensor | None) -> tuple[Tensor, int]:
        assert buffer is not None
        (expected,) = group.numbers([0])
        handle = torch.zeros(HANDLE_BYTES, dtype=torch.uint8)
        group.broadcast(handle, on_host=True)
        copy_shared(bytes(handle.tolist()), buffer[:n_bytes])
        group.meet()
        return buffer[:n_bytes], expected


_TRANSPORTS: dict[str, type[_Broadcast | _SharedMemory | _CudaIpc]] = {
    NCCL: _Broadcast,
    GLOO: _Broadcast,
    SHARED_MEMORY: _SharedMemory,
    IPC: _CudaIpc,
}
