"""A checkpoint of the student on this machine: what training waits for, and how fast the files are.

Part of `bench_student`. One rank, one thread, float32. Three modes take turns: some steps, the same steps with a save
begun before the first, and a save that training waits for. The disk's own speed is measured in the same round, and a
ratio is the median over the rounds of ratios within a round.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gkd.actor.common.host_copies import Snapshot
from gkd.actor.common.shard_writer import BackgroundWriter, write
from gkd.actor.common.shards import ShardReader, file_name
from gkd.data.batching import make_micro_batches
from tests.bench.student_case import make_student, save_model, sequences
from tests.bench.teacher_report import Figure, Part, Table

_BLOCK_BYTES = 8 << 20
_STEPS = 2  # of each mode; the save must be over before they are
_SIZES = {"hidden_size": 512, "intermediate_size": 1536}  # 200 MB of weights and moments


@dataclass(frozen=True, slots=True)
class _Round:
    """Seconds."""

    steps: float  # _STEPS of them
    steps_with_save: float  # the same, with a save begun before the first
    late: float  # how long that save went on after them
    copy: float  # to the host, with training waiting for it
    write: float  # hashed, and on disk
    disk_write: float  # the same bytes, plainly
    read: float  # of every piece
    load: float  # into the student
    disk_read: float
    cold: bool  # were the files read from the disk itself

    @property
    def save(self) -> float:
        """One that training waits for."""
        return self.copy + self.write

    @property
    def stall(self) -> float:
        return self.steps_with_save - self.steps


def checkpoint_part(rounds: int) -> Part:
    """Measures on the disk of the folder for temporary files; TMPDIR chooses another."""
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as name, _student(Path(name)) as (student, step):
        folder, writer = Path(name), BackgroundWriter()
        snapshot = student.snapshot()
        write(folder / "beside", 0, snapshot)  # memory and files are made once
        n_bytes = sum(piece.data.nbytes for piece in snapshot.pieces)
        snapshot.release()
        # The order alternates, because the first measurement starts with the disk and caches of the previous round.
        found = [_round(student, step, writer, folder, save_first=i % 2 == 1) for i in range(rounds)]
    return _part(found, n_bytes)


def _round(
    student: Any, step: Callable[[], object], writer: BackgroundWriter, folder: Path, *, save_first: bool
) -> _Round:
    seconds: dict[str, float] = {}

    def take_steps(*, with_save: bool) -> None:
        if with_save:
            writer.start(folder / "beside", 0, student.snapshot())
        for _ in range(_STEPS):
            step()

    for with_save in (save_first, not save_first):
        os.sync()
        name = "steps_with_save" if with_save else "steps"
        seconds[name] = _seconds(lambda with_save=with_save: take_steps(with_save=with_save))
        if with_save:
            seconds["late"] = _seconds(lambda: writer.finished(wait=True))

    os.sync()
    snapshots: list[Snapshot] = []
    seconds["copy"] = _seconds(lambda: _copy(student, snapshots))
    snapshot = snapshots[0]
    seconds["write"] = _seconds(lambda: write(folder / "sync", 0, snapshot))
    path, plain = folder / "sync" / file_name(0), folder / "plain"
    content = path.read_bytes()
    seconds["disk_write"] = _seconds(lambda: _plain_write(plain, content))
    cold = [_drop(plain)]
    seconds["disk_read"] = _seconds(lambda: _plain_read(plain))
    cold.append(_drop(path))
    seconds["read"] = _seconds(lambda: _read_all(folder / "sync", snapshot))
    snapshot.release()
    cold.append(_drop(path))
    seconds["load"] = _seconds(lambda: student.load_checkpoint(folder / "sync"))
    return _Round(**seconds, cold=all(cold))


def _copy(student: Any, snapshots: list[Snapshot]) -> None:
    snapshots.append(student.snapshot())
    snapshots[0].wait()


def _part(found: Sequence[_Round], n_bytes: int) -> Part:
    def ratio(name: str, other: str) -> float:
        return median(getattr(item, name) / getattr(item, other) for item in found)

    cold = all(item.cold for item in found)
    cache = "cold: the files were dropped from the page cache" if cold else "warm: the page cache could not be dropped"
    n_late = sum(item.late > 0.01 for item in found)
    figures = [
        Figure(
            "stall of training by an asynchronous save / synchronous save",
            ratio("stall", "save"),
            at_most=0.1,
            note=f"{n_late} of {len(found)} saves ended after the {_STEPS} steps" if n_late else "",
        ),
        Figure("copy to the host alone / synchronous save", ratio("copy", "save")),
        Figure("write, hashed / plain write, bandwidth", ratio("disk_write", "write"), at_least=0.8),
        Figure("read of every piece / plain read, bandwidth", ratio("disk_read", "read"), note=cache),
        Figure("load into the student / plain read, bandwidth", ratio("disk_read", "load"), note=cache),
    ]
    rows = []
    for name, what, moves_all in (
        ("steps", f"{_STEPS} training steps", False),
        ("steps_with_save", "the same with a save beside them", False),
        ("stall", "stall", False),
        ("save", "synchronous save", True),
        ("copy", "copy to the host", True),
        ("write", "write, hashed, fsync", True),
        ("disk_write", "plain write, fsync", True),
        ("read", "read of every piece", True),
        ("load", "load into the student", True),
        ("disk_read", "plain read", True),
    ):
        seconds = [getattr(item, name) for item in found]
        speed = f"{n_bytes / median(seconds) / 1e9:.2f}" if moves_all else ""
        rows.append((what, median(seconds), min(seconds), max(seconds), speed))
    table = Table("", ("what", "median, s", "fastest, s", "slowest, s", "GB/s"), rows)
    settings = {"rounds": len(found), "megabytes": round(n_bytes / 1e6, 1), "cache": cache}
    what = f"{n_bytes / 1e6:.0f} MB of weights and moments, one rank, one thread for training."
    return Part("checkpoint", what, figures, [table], settings)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _plain_write(path: Path, content: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        for begin in range(0, len(content), _BLOCK_BYTES):
            file.write(memoryview(content)[begin : begin + _BLOCK_BYTES])
        os.fsync(file.fileno())


def _plain_read(path: Path) -> None:
    block = bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            continue


def _read_all(folder: Path, snapshot: Snapshot) -> None:
    """Back into the memory that the files were written from."""
    with ShardReader(folder) as reader:
        for piece in snapshot.pieces:
            stop = piece.start + piece.data.numel()
            reader.read(piece.name, piece.kind, piece.part, piece.start, stop, out=piece.data)


def _drop(path: Path) -> bool:
    """Ask the kernel to drop a file's cached pages. Return whether it reports that it did."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # only clean pages can go
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        middle = os.fstat(file.fileno()).st_size // 2
        try:
            os.preadv(file.fileno(), [bytearray(1)], middle, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:  # a file system in memory, say
                raise
    return False


@contextmanager
def _student(folder: Path) -> Iterator[tuple[Any, Callable[[], object]]]:
    """A student of one process with random weights, and a step of it; the first is made."""
    torch.set_num_threads(1)
    save_model(folder / "hf", **_SIZES)
    rollouts, scores = sequences("even")
    batches = list(make_micro_batches(rollouts[:1], scores[:1], micro_batch_size=1, max_tokens=0, packed=False))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        student = make_student("megatron", folder / "hf")
        student.train_step(batches)
        yield student, lambda: student.train_step(batches)
    finally:
        dist.destroy_process_group()
