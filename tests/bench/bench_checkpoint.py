"""A checkpoint of the student on this machine, measured: what training waits for, and how fast the files are.

    python -m tests.bench.bench_checkpoint [--folder FOLDER] [--rounds N] [--json FILE]

One process, float32, about 150 MB of weights and moments. The folder's disk is what is measured: a synchronous
save, a save beside training, and the disk's own speed take turns, and a ratio is the median over the rounds of
ratios within a round. A run replaces its part of the JSON file. Under a minute on two idle cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gkd.actor.shard_writer import BackgroundWriter, write
from gkd.actor.shards import ShardReader, Snapshot, file_name
from tests.bench.teacher_report import Figure, Observer, Part, Table, as_json, as_text, machine, merge_json
from tests.dist.helpers import free_port
from tests.dist.megatron_reference import make_micro_batches

_BLOCK_BYTES = 8 << 20
_STEPS = 4  # before and after a save, to say how long one takes
_SIZES = {
    "vocab_size": 8192,
    "hidden_size": 320,
    "intermediate_size": 896,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@dataclass
class _Round:
    """Seconds of one round, and whether its files were read from the disk itself."""

    step: float = 0.0
    snapshot: float = 0.0
    save: float = 0.0  # synchronous, snapshot included
    stall: float = 0.0  # of training by a save in the background
    beside: float = 0.0  # from the begin of that save until its files were on disk
    write: float = 0.0
    disk_write: float = 0.0
    read: float = 0.0
    load: float = 0.0
    disk_read: float = 0.0
    cold: list[bool] = field(default_factory=list)


def checkpoint(folder: Path, rounds: int) -> Part:
    """Measures in `folder`, which must be empty; its disk is the one that counts."""
    with _student(folder) as student:
        writer, found = BackgroundWriter(), []
        snapshot = student.snapshot()
        n_bytes = snapshot.buffer.nbytes
        write(folder / "warm", 0, snapshot)  # memory, files and Megatron's buffers are made once
        snapshot.release()
        for _ in range(rounds):
            found.append(_round(student, writer, folder))
        student.load_checkpoint(folder / "warm")
    return _part(found, n_bytes)


def _round(student: Any, writer: BackgroundWriter, folder: Path) -> _Round:
    result = _Round()
    batches = make_micro_batches(0)
    steps = [_seconds(lambda: student.train_step(batches)) for _ in range(_STEPS)]

    snapshots: list[Snapshot] = []
    result.snapshot = _seconds(lambda: snapshots.append(student.snapshot()))
    result.write = _seconds(lambda: write(folder / "sync", 0, snapshots[0]))
    result.save = result.snapshot + result.write
    result.disk_write = _seconds(lambda: _plain_write(folder / "plain", snapshots[0].buffer))
    snapshots[0].release()

    begin, n_steps, times = time.perf_counter(), 0, []
    writer.start(folder / "beside", 0, student.snapshot())
    while not times:
        student.train_step(batches)
        n_steps += 1
        if writer.finished(wait=False) is not None:
            times.append(time.perf_counter() - begin)
    steps += [_seconds(lambda: student.train_step(batches)) for _ in range(_STEPS)]
    result.step, result.beside = median(steps), times[0]
    result.stall = result.beside - n_steps * result.step

    path = folder / "sync" / file_name(0)
    result.cold.append(_drop(folder / "plain"))
    result.disk_read = _seconds(lambda: _plain_read(folder / "plain"))
    result.cold.append(_drop(path))
    result.read = _seconds(lambda: _read_all(folder / "sync", snapshots[0]))
    result.cold.append(_drop(path))
    result.load = _seconds(lambda: student.load_checkpoint(folder / "sync"))
    return result


def _part(found: Sequence[_Round], n_bytes: int) -> Part:
    def ratio(name: str, other: str) -> float:
        return median(getattr(item, name) / getattr(item, other) for item in found)

    cold = all(all(item.cold) for item in found)
    cache = "cold: the files were dropped from the page cache" if cold else "warm: the page cache could not be dropped"
    figures = [
        Figure("stall of training by a save beside it / synchronous save", ratio("stall", "save"), at_most=0.1),
        Figure("copy to the host alone / synchronous save", ratio("snapshot", "save")),
        Figure("write, hashed / plain write, bandwidth", ratio("disk_write", "write"), at_least=0.8),
        Figure("read of every piece / plain read, bandwidth", ratio("disk_read", "read"), note=cache),
        Figure("load into the student / plain read, bandwidth", ratio("disk_read", "load"), note=cache),
    ]
    rows = []
    for name, what in (
        ("step", "training step"),
        ("snapshot", "copy to the host"),
        ("save", "synchronous save"),
        ("stall", "stall by a save beside training"),
        ("beside", "that save, until it is on disk"),
        ("write", "write, hashed, fsync"),
        ("disk_write", "plain write, fsync"),
        ("read", "read of every piece"),
        ("load", "load into the student"),
        ("disk_read", "plain read"),
    ):
        seconds = [getattr(item, name) for item in found]
        moves_all = name not in ("step", "stall", "beside")
        speed = f"{n_bytes / median(seconds) / 1e9:.2f}" if moves_all else ""
        rows.append((what, median(seconds), min(seconds), max(seconds), speed))
    table = Table("", ("what", "median, s", "fastest, s", "slowest, s", "GB/s"), rows)
    settings = {"rounds": len(found), "megabytes": round(n_bytes / 1e6, 1), "cache": cache}
    return Part("checkpoint", f"{n_bytes / 1e6:.0f} MB of weights and moments, one rank.", figures, [table], settings)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _plain_write(path: Path, buffer: torch.Tensor) -> None:
    raw = buffer.numpy().data
    with path.open("wb", buffering=0) as file:
        for begin in range(0, len(raw), _BLOCK_BYTES):
            file.write(raw[begin : begin + _BLOCK_BYTES])
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
    """Asks the kernel to forget a file's pages; whether it did."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # only clean pages can go
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        middle = os.fstat(file.fileno()).st_size // 2
        try:
            os.preadv(file.fileno(), [bytearray(1)], middle, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
    return False


@contextmanager
def _student(folder: Path) -> Iterator[Any]:
    """A student of one process with random weights, after its first step."""
    import transformers as tf

    from gkd.actor.megatron.layout import ParallelLayout
    from gkd.actor.megatron.student import MegatronStudent
    from gkd.actor.optim_spec import OptimSpec
    from gkd.loss.spec import LossSpec

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tf.Qwen3ForCausalLM(tf.Qwen3Config(**_SIZES)).save_pretrained(folder / "hf")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        student = MegatronStudent(
            folder / "hf",
            ParallelLayout(tp=1, pp=1, world_size=1, rank=0),
            optim=OptimSpec(lr=1e-4),
            loss=LossSpec(),
            dtype=torch.float32,
            device=torch.device("cpu"),
            seed=0,
        )
        student.train_step(make_micro_batches(0))
        yield student
    finally:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="on the disk to measure; default: the system's")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="docs/results/student_checkpoint_cpu.json, say")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least one round")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    observer = Observer()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        part = checkpoint(Path(folder), args.rounds)
    result = as_json(part, machine(), observer.stop())
    print(as_text(part))
    if args.json is not None:
        merge_json(args.json, {part.name: result})
    return 1 if any(figure.met is False for figure in part.figures) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
