"""Write one rank's snapshot to disk in the background.

A thread suffices, because the hash and the write of a large block both release the interpreter lock. It has a lower
priority than training. The digest is of the bytes that were passed to the file, so that later damage of the disk is
detected.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import xxhash

from gkd.actor.common.hf_folder import safetensors_start
from gkd.actor.common.host_copies import Snapshot
from gkd.actor.common.shards import FORMAT, file_name
from gkd.errors import CheckpointError
from gkd.run.disk import WRITE_FIX
from gkd.types import FileDigest

# Small enough to stay in the CPU cache between the hash and the write; large enough that the thread seldom has to
# acquire the interpreter lock, which takes up to 5 ms while the training thread runs Python code.
_BLOCK_BYTES = 4 << 20
_NICENESS = 10  # added to the niceness of the thread; 19 is the lowest priority


def write(folder: Path, rank: int, snapshot: Snapshot) -> dict[str, FileDigest]:
    """Write this rank's file into `folder` and flush it to disk. Creates the folder, but not its parent. Blocks.

    Returns:
        File name -> digest.

    Raises:
        CheckpointError: the file cannot be written (disk full, read-only, ...); an incomplete file remains. Or the
            parent folder does not exist: it was removed, or it is not on a disk that this node shares.
        ValueError: two pieces have the same name, kind, part and start.
    """
    path = folder / file_name(rank)
    tensors = {f"{p.name}/{p.kind}/{p.part}/{p.start}": p.data for p in snapshot.pieces}
    tensors |= {f"rng/{name}": state for name, state in snapshot.rng.items()}
    if len(tensors) != len(snapshot.pieces) + len(snapshot.rng):
        raise ValueError(f"rank {rank}: two pieces of a checkpoint have the same name, kind, part and start")
    plan = [(name, (tensor.numel(),), tensor.dtype) for name, tensor in tensors.items()]
    meta = {**snapshot.meta, "format": FORMAT, "rank": rank}
    start = memoryview(safetensors_start(plan, {"gkd": json.dumps(meta)}))
    snapshot.wait()
    hasher = xxhash.xxh3_128()
    n_bytes = 0
    try:
        _make_folder(folder, rank)
        with path.open("wb") as file:
            for block in chain([start], _blocks(tensors.values())):
                hasher.update(block)
                file.write(block)
                n_bytes += len(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = f"rank {rank} cannot write its checkpoint to {path}: {error.strerror}. {WRITE_FIX}"
        raise CheckpointError(problem) from error
    return {path.name: FileDigest(n_bytes, hasher.hexdigest())}


class BackgroundWriter:
    """Write one snapshot at a time in a thread, and release its memory afterwards."""

    def __init__(self) -> None:
        self._save: Future[dict[str, FileDigest]] | None = None  # the last one
        self._folder: Path | None = None

    def check_idle(self) -> None:
        """Raise CheckpointError if a save is in progress."""
        if self._save is not None and not self._save.done():
            raise CheckpointError(
                f"the save to {self._folder} is still in progress. Fix: wait for it before the next one."
            )

    def start(self, folder: Path, rank: int, snapshot: Snapshot) -> None:
        """Start to write; returns at once. Raises CheckpointError if the previous save is in progress."""
        self.check_idle()
        save = self._save = Future()
        self._folder = folder
        # A daemon, so that a process that ends for another reason does not wait for the disk.
        threading.Thread(target=self._run, args=(save, folder, rank, snapshot), daemon=True, name="checkpoint").start()

    def finished(self, *, wait: bool) -> dict[str, FileDigest] | None:
        """Return the files of the save and their digests, or None while it is in progress; repeatable.

        Raises:
            CheckpointError: the save failed, or none was started.
        """
        if self._save is None:
            raise CheckpointError("no save was started.")
        return self._save.result() if wait or self._save.done() else None

    @staticmethod
    def _run(save: Future[dict[str, FileDigest]], folder: Path, rank: int, snapshot: Snapshot) -> None:
        problem: CheckpointError | None = None
        files: dict[str, FileDigest] = {}
        try:
            os.nice(_NICENESS)  # on Linux, of this thread alone
            files = write(folder, rank, snapshot)
        except CheckpointError as error:
            problem = error
        except Exception as error:  # `finished` raises it; uncaught, it would be lost with the thread
            problem = CheckpointError(f"rank {rank} failed to save to {folder}: {type(error).__name__}: {error}")
        snapshot.release()
        # Last, because a caller that sees it may start the next save.
        if problem is None:
            save.set_result(files)
        else:
            save.set_exception(problem)


def _make_folder(folder: Path, rank: int) -> None:
    """Create the folder but not its parent, so that a rank that outlives its run does not recreate a removed one."""
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"rank {rank} cannot write its checkpoint to {folder}: the parent folder, created by the driver, does not "
            "exist on this node. Fix: put trainer.run_dir on a disk that all nodes share."
        ) from error


def _blocks(tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """Yield the tensors' bytes, from a GPU copied block by block."""
    for run in _runs(tensors):
        for begin in range(0, len(run), _BLOCK_BYTES):
            # These may be live states, so avoid Tensor.numpy(): see `gkd.memory.states`.
            yield np.from_dlpack(run[begin : begin + _BLOCK_BYTES].cpu()).data


def _runs(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors' bytes, [n] uint8; tensors that are contiguous in memory as one run."""
    current: torch.UntypedStorage | None = None
    begin = stop = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        offset = int(tensor.storage_offset()) * tensor.itemsize
        if current is not None and (storage.data_ptr() != current.data_ptr() or offset != stop):
            yield _raw(current, begin, stop)
            current = None
        if current is None:
            begin = offset
            current = storage
        stop = offset + tensor.nbytes
    if current is not None:
        yield _raw(current, begin, stop)


def _raw(storage: torch.UntypedStorage, begin: int, stop: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[begin:stop]
