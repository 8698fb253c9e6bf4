"""Writes one rank's snapshot to disk while training goes on.

A thread is enough: both the hash and the write of a large block leave the interpreter lock. It is a polite one: where
cores are scarce, training has them first. The digest is of the bytes that were handed to the file, so that damage on
the disk shows later.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import xxhash

from gkd.actor.common.host_copies import Snapshot
from gkd.actor.common.shards import DTYPES, FORMAT, file_name
from gkd.errors import CheckpointError
from gkd.handles import FileDigest

# Small enough to stay in a cache between the hash and the write; large enough that the thread seldom has to get the
# interpreter lock back, which takes up to 5 ms while the training thread is busy in Python.
_BLOCK_BYTES = 4 << 20
_NICENESS = 10  # added to the background thread's; 19 is the least urgent
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write(folder: Path, rank: int, snapshot: Snapshot) -> dict[str, FileDigest]:
    """Writes this rank's file into `folder`, flushed to disk; creates the folder, but not its parent. Blocks.

    Returns:
        File name -> digest.

    Raises:
        CheckpointError: disk full, read-only, ...; what was written so far stays behind. Or there is no parent
            folder: it was removed, or this node does not see the disk that it is on.
        ValueError: two pieces begin at the same place, so one of them has the wrong name.
    """
    path = folder / file_name(rank)
    tensors = {f"{p.name}/{p.kind}/{p.part}/{p.start}": p.data for p in snapshot.pieces}
    tensors |= {f"rng/{name}": state for name, state in snapshot.rng.items()}
    if len(tensors) != len(snapshot.pieces) + len(snapshot.rng):
        raise ValueError(f"rank {rank}: two pieces of a checkpoint have the same name, kind, part and start")
    snapshot.wait()
    hasher, n_bytes = xxhash.xxh3_128(), 0
    try:
        _make_folder(folder, rank)
        with path.open("wb") as file:
            for raw in (_header(tensors, snapshot, rank), *_runs(tensors.values())):
                for begin in range(0, len(raw), _BLOCK_BYTES):
                    block = raw[begin : begin + _BLOCK_BYTES]
                    hasher.update(block)
                    file.write(block)
                n_bytes += len(raw)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"rank {rank} cannot write its checkpoint to {path}: {error.strerror}") from error
    return {path.name: FileDigest(n_bytes, hasher.hexdigest())}


class BackgroundWriter:
    """One thread that writes one snapshot at a time, and releases its memory afterwards."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._folder: Path | None = None
        self._result: dict[str, FileDigest] | CheckpointError | None = None

    def check_idle(self) -> None:
        """Raises CheckpointError if a save is under way."""
        if self._thread is not None and self._result is None:
            raise CheckpointError(
                f"the save to {self._folder} is still being written; wait for it before the next one."
            )

    def start(self, folder: Path, rank: int, snapshot: Snapshot) -> None:
        """Begins to write; returns at once. Raises CheckpointError if the save before is still under way."""
        self.check_idle()
        self._result, self._folder = None, folder
        # A daemon: a process that ends for another reason must not wait for the disk.
        self._thread = threading.Thread(target=self._run, args=(folder, rank, snapshot), daemon=True, name="checkpoint")
        self._thread.start()

    def finished(self, *, wait: bool) -> dict[str, FileDigest] | None:
        """What the save wrote, or None while it is under way; the same answer until the next start.

        Raises:
            CheckpointError: it failed, or nothing was started.
        """
        if self._thread is None:
            raise CheckpointError("no save was started, so none can finish.")
        if wait or self._result is not None:
            self._thread.join()
        if isinstance(self._result, CheckpointError):
            raise self._result
        return self._result

    def _run(self, folder: Path, rank: int, snapshot: Snapshot) -> None:
        result: dict[str, FileDigest] | CheckpointError
        try:
            os.nice(_NICENESS)  # on Linux of this thread alone
            result = write(folder, rank, snapshot)
        except CheckpointError as error:
            result = error
        except Exception as error:  # a thread's error is seen by nobody unless it is kept
            result = CheckpointError(f"rank {rank}'s save to {folder} failed: {type(error).__name__}: {error}")
        snapshot.release()
        self._result = result  # the last thing: whoever sees it may begin the next save


def _make_folder(folder: Path, rank: int) -> None:
    """The driver makes the parent: a rank that outlives its run must not bring a removed one back."""
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"rank {rank} cannot write its checkpoint to {folder}: its node does not see the folder's parent, "
            "which the driver made. run_dir must be on a disk that all nodes share."
        ) from error


def _header(tensors: dict[str, torch.Tensor], snapshot: Snapshot, rank: int) -> memoryview:
    """The file's beginning: 8 bytes of length and the JSON, padded so that the data are aligned."""
    meta = {**snapshot.meta, "format": FORMAT, "rank": rank}
    header: dict[str, object] = {"__metadata__": {"gkd": json.dumps(meta)}}
    offset = 0
    for key, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[key] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": [tensor.numel()],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _runs(tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """The tensors' bytes; neighbours in memory as one."""
    of: torch.UntypedStorage | None = None
    begin = stop = 0
    for tensor in tensors:
        storage, at = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize
        if of is not None and (storage.data_ptr() != of.data_ptr() or at != stop):
            yield _raw(of, begin, stop)
            of = None
        if of is None:
            begin, of = at, storage
        stop = at + tensor.nbytes
    if of is not None:
        yield _raw(of, begin, stop)


def _raw(storage: torch.UntypedStorage, begin: int, stop: int) -> memoryview:
    return torch.empty(0, dtype=torch.uint8).set_(storage)[begin:stop].numpy().data
