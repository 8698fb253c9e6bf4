"""Move buckets of weights from the actor's ranks to the rollout engines.

A group is a bare ProcessGroup over a TCPStore of its own. It is not registered as a default group, so it can span a
Megatron process and a vLLM process that have default groups of their own. There is one group for each pipeline stage.
Its rank 0 is the stage's exporting rank, and the others are all workers of all rollout engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gkd.errors import WeightSyncError
from gkd.weight_sync.buckets import Bucket, digest

_PROBE = 0x5A


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Arguments of one member for joining a group: the address of its store, and the member's rank.

    Attributes:
        timeout_s: of one broadcast.
        join_s: until all members have arrived.
    """

    backend: str  # "gloo" | "nccl"
    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float
    join_s: float


class TransferGroup:
    """A broadcast-only group. The constructor blocks until all members have joined. Raises WeightSyncError.

    Attributes:
        device: where the buffers are: host memory for gloo.
    """

    def __init__(self, spec: GroupSpec, device: torch.device) -> None:
        join_time, timeout = timedelta(seconds=spec.join_s), timedelta(seconds=spec.timeout_s)
        self.spec, self.device = spec, torch.device("cpu") if spec.backend == "gloo" else device
        try:
            self._store = dist.TCPStore(
                spec.host,
                spec.port,
                spec.world_size,
                is_master=spec.rank == 0,
                timeout=join_time,
                wait_for_workers=False,
            )
            store = dist.PrefixStore("weight_sync", self._store)
            # First, because the group's constructor waits for the members as long as a broadcast may take.
            store.set(f"here {spec.rank}", "")
            store.wait([f"here {rank}" for rank in range(spec.world_size)], join_time)
            if spec.backend == "gloo":
                self._group: Any = dist.ProcessGroupGloo(store, spec.rank, spec.world_size, timeout)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(store, spec.rank, spec.world_size, options)
            self._probe()
        except (RuntimeError, dist.DistError) as error:
            raise WeightSyncError(
                f"rank {spec.rank} of {spec.world_size} could not join the weight-sync group at "
                f"{spec.host}:{spec.port} ({spec.backend}) within {spec.join_s:.0f} s: {error}"
            ) from error

    def _probe(self) -> None:
        """Broadcast one byte, because NCCL connects the members only at the first collective.

        Raises RuntimeError, WeightSyncError.
        """
        byte = torch.full((1,), _PROBE if self.spec.rank == 0 else 0, dtype=torch.uint8, device=self.device)
        self.broadcast(byte)
        if byte.item() != _PROBE:
            raise WeightSyncError(
                f"rank {self.spec.rank}: a probe of the weight-sync group received {byte.item()}, expected {_PROBE}"
            )

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Broadcast from rank 0, in place; blocks until the data is received (gloo) or enqueued on a stream (nccl).

        After an error the group is unusable, and the connections are closed, so that the other members fail, too,
        instead of waiting for the time-out.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        try:
            self._group.broadcast([buffer], options).wait()
        except RuntimeError as error:
            self.close()
            raise WeightSyncError(
                f"weight-sync broadcast failed on rank {self.spec.rank} of {self.spec.world_size}: {error}"
            ) from error

    def close(self) -> None:
        """Leave the group without waiting for the others. Their calls fail."""
        self._group.abort()


def send(
    group: TransferGroup | None,
    buckets: Sequence[Bucket],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    with_digests: bool,
    kept: Sequence[torch.Tensor] | None = None,
) -> dict[str, str]:
    """Copy `tensors` (in the order of the buckets) into buckets and broadcast each bucket.

    Args:
        group: None: this rank only participates in producing the tensors, a collective over the stage's exporting
            ranks, and sends nothing.
        kept: a host buffer for each bucket, which holds its bytes afterwards.

    Returns:
        Digests by name; empty without `with_digests` or without a group.

    Raises:
        WeightSyncError: the tensors differ from the buckets' specs.
    """
    if group is None:
        for _ in _fill(buckets, tensors, [None] * len(buckets)):
            pass
        return {}
    in_place = kept is not None and group.device.type == "cpu"
    buffers = (torch.empty(bucket.n_bytes, dtype=torch.uint8, device=group.device) for bucket in buckets)
    filled = zip(buckets, _fill(buckets, tensors, kept if in_place and kept is not None else buffers), strict=True)
    return send_filled(group, filled, with_digests=with_digests, kept=None if in_place else kept)


def send_filled(
    group: TransferGroup,
    filled: Iterable[tuple[Bucket, torch.Tensor]],
    *,
    with_digests: bool,
    kept: Sequence[torch.Tensor] | None = None,
) -> dict[str, str]:
    """Broadcast buckets from their buffers, and copy each to `kept`. Returns as `send`."""
    digests: dict[str, str] = {}
    for i, (bucket, buffer) in enumerate(filled):
        group.broadcast(buffer)
        if kept is not None:
            kept[i].copy_(buffer)
        if with_digests:
            digests |= {name: digest(view) for name, view in bucket.views(buffer)}
    return digests


def _fill(
    buckets: Sequence[Bucket], tensors: Iterable[tuple[str, torch.Tensor]], buffers: Iterable[torch.Tensor | None]
) -> Iterator[torch.Tensor]:
    """Copy the tensors into one buffer for each bucket; yield the filled buffers. Raises as `send`.

    Args:
        buffers: None: discard the bucket's tensors, and yield nothing.
    """
    stream = iter(tensors)
    for bucket, buffer in zip(buckets, buffers, strict=True):
        views: Iterator[tuple[str, torch.Tensor | None]] = (
            bucket.views(buffer) if buffer is not None else ((spec.name, None) for spec in bucket.specs)
        )
        for name, view in views:
            exported, tensor = next(stream, ("<end of stream>", None))
            if exported != name or tensor is None:
                raise WeightSyncError(f"the exporter yielded {exported}, expected {name} by its export plan")
            if view is not None:
                view.copy_(tensor)
            del tensor  # free it before the next one is produced
        if buffer is not None:
            yield buffer


def receive(
    group: TransferGroup,
    buckets: Sequence[Bucket],
    load: Callable[[list[tuple[str, torch.Tensor]]], None],
) -> int:
    """Receive every bucket of one sender and pass its tensors to `load`. Returns the bytes received."""
    total = 0
    for bucket in buckets:
        buffer = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=group.device)
        group.broadcast(buffer)
        load(list(bucket.views(buffer)))
        total += bucket.n_bytes
    return total
