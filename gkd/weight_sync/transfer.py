"""Send weights in buckets, and load them: export, transfer and load of successive buckets overlap.

    sender    export 1 | export 2             | export 3
                         send and checksum 1  | send and checksum 2
    receiver             receive, compare 1   | receive, compare 2
                                                load 1              | load 2

Each side has one thread more, which moves a bucket while the calling thread exports the next or loads the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from gkd.config.schema_rollout import IPC
from gkd.errors import WeightSyncError
from gkd.weight_sync.buckets import Bucket, digest, layout
from gkd.weight_sync.group import TransferGroup
from gkd.weight_sync.segment import Segment


def send(
    group: TransferGroup | None,
    buckets: Sequence[Bucket],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    with_digests: bool,
    kept: Segment | None = None,
) -> dict[str, str]:
    """Copy `tensors` (in the order of the buckets) into buckets and send each bucket.

    Args:
        group: None: this rank only participates in producing the tensors, a collective over the stage's exporting
            ranks, and sends nothing.
        kept: holds the buckets afterwards, as `layout` places them. Required by the transport shared_memory.

    Returns:
        Digests by name; empty without `with_digests` or without a group.

    Raises:
        WeightSyncError: the tensors differ from the buckets' specs, or the transfer failed.
    """
    if group is None:
        for _ in _fill(buckets, tensors, [None] * len(buckets)):
            pass
        return {}
    in_place = group.device.type == "cpu"
    hosts: Sequence[torch.Tensor | None] = [None] * len(buckets)
    if kept is not None:
        hosts = _views(buckets, kept)
    elif in_place:
        hosts = _two_buffers(buckets, torch.device("cpu"))
    filled = _fill(buckets, tensors, hosts if in_place else _two_buffers(buckets, group.device))
    try:
        return _send_filled(group, buckets, filled, hosts, kept, with_digests=with_digests)
    finally:
        del filled
        if group.transport == IPC and group.device.type == "cuda":
            torch.cuda.ipc_collect()  # memory that was shared and that no process has open any more


@contextmanager
def failing_together(group: TransferGroup | None, tensors: Iterator[object]) -> Iterator[None]:
    """After an error in the block, end the transfer of the group's members and exhaust `tensors`.

    The other exporting ranks take part in producing each tensor: they would wait for this rank in the middle of the
    export, and its next export would be combined with the rest of theirs.
    """
    try:
        yield
    except BaseException:
        if group is not None:
            group.close()
        for _ in tensors:
            pass
        raise


def send_kept(group: TransferGroup, buckets: Sequence[Bucket], kept: Segment) -> dict[str, str]:
    """Send buckets that an earlier `send` has kept, over a group whose buckets are in host memory. Returns digests."""
    views = _views(buckets, kept)
    return _send_filled(group, buckets, iter(views), views, kept, with_digests=True)


def receive(
    group: TransferGroup,
    buckets: Sequence[Bucket],
    load: Callable[[list[tuple[str, torch.Tensor]]], None],
) -> int:
    """Receive every bucket of one sender and pass its tensors to `load`. Returns the bytes received.

    Args:
        load: the tensors are valid only during this call.

    Raises:
        WeightSyncError: the transfer failed, or a bucket was damaged; names its first tensors.
    """
    buffers = [None] * len(buckets) if group.shares_memory else _two_buffers(buckets, group.device)

    def arrive(i: int) -> torch.Tensor:
        try:
            return group.receive_bucket(buckets[i].n_bytes, buffers[i])
        except WeightSyncError as error:
            names = [spec.name for spec in buckets[i].specs]
            where = f"member {group.spec.rank}: bucket {i} of {len(buckets)} ({len(names)} tensors, first {names[:3]})"
            raise type(error)(f"{where}: {error}") from error

    with _mover(group) as mover:
        arriving = mover.submit(arrive, 0)
        for i, bucket in enumerate(buckets):
            buffer = arriving.result()
            if i + 1 < len(buckets):
                arriving = mover.submit(arrive, i + 1)
            load(list(bucket.views(buffer)))
    return sum(bucket.n_bytes for bucket in buckets)


def _send_filled(
    group: TransferGroup,
    buckets: Sequence[Bucket],
    filled: Iterator[torch.Tensor],
    hosts: Sequence[torch.Tensor | None],
    kept: Segment | None,
    *,
    with_digests: bool,
) -> dict[str, str]:
    """Send each bucket while the next one is filled. Returns as `send`.

    Args:
        filled: the buckets' buffers.
        hosts: host memory of each bucket, the same as in `filled` or for a copy of it; None: no copy is needed.
    """
    digests: dict[str, str] = {}
    offsets, _ = layout(buckets)

    def leave(i: int, buffer: torch.Tensor) -> None:
        group.send_bucket(buffer, hosts[i], None if kept is None else (kept, offsets[i]))
        if with_digests:
            digests.update((name, digest(view, group.own_device)) for name, view in buckets[i].views(buffer))

    with _mover(group) as mover:
        leaving: Future[None] | None = None
        for i, buffer in enumerate(filled):
            if leaving is not None:
                leaving.result()
            leaving = mover.submit(leave, i, buffer)
        if leaving is not None:
            leaving.result()
    return digests


def _fill(
    buckets: Sequence[Bucket], tensors: Iterable[tuple[str, torch.Tensor]], buffers: Sequence[torch.Tensor | None]
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


def _views(buckets: Sequence[Bucket], kept: Segment) -> list[torch.Tensor]:
    """Return each bucket's part of a segment."""
    offsets, _ = layout(buckets)
    return [kept.bytes[start : start + bucket.n_bytes] for start, bucket in zip(offsets, buckets, strict=True)]


def _two_buffers(buckets: Sequence[Bucket], device: torch.device) -> list[torch.Tensor]:
    """Return a buffer for each bucket; every second one has the same memory, so that two buckets exist at a time."""
    largest = max((bucket.n_bytes for bucket in buckets), default=0)
    memory = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in buckets[:2]]
    return [memory[i % 2][: bucket.n_bytes] for i, bucket in enumerate(buckets)]


@contextmanager
def _mover(group: TransferGroup) -> Iterator[ThreadPoolExecutor]:
    """Yield the thread that moves buckets. An error of the block closes the group, which ends the thread's transfer.

    On a GPU it uses the caller's stream, so that a buffer is overwritten only after the loads from it. vLLM's workers
    do not use the default stream.
    """
    stream = torch.cuda.current_stream(group.device) if group.device.type == "cuda" else None

    def select_stream() -> None:
        if stream is not None:
            torch.cuda.set_stream(stream)  # selects its device, too

    with ThreadPoolExecutor(1, "weight sync", select_stream) as mover:
        try:
            yield mover
        except BaseException:
            group.close()
            raise
