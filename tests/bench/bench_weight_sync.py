"""Measure a weight sync of a student with 0.5 billion parameters between two processes of this host.

    python -m tests.bench.bench_weight_sync [--json FILE] [--rounds N] [--device cpu|cuda] [--gpus 1]

The student has the shapes of Qwen2.5-0.5B, random weights, 2 GB in float32. The receiver is a real vLLM engine. In each
round every way is measured once, interleaved, after one round that is not counted. Needs 12 GB and up to 4 minutes.

cuda: with one GPU sender and engine share it, as in a colocated run: over CUDA IPC, and over gloo, which passes through
host memory. With two, NCCL connects them. Figures have goals on the CPU and for CUDA IPC; every verified way must give
the engine the sender's digests.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from gkd.config.schema_rollout import GLOO, IPC, NCCL, SHARED_MEMORY
from gkd.weight_sync.group import GroupSpec
from tests.bench import weight_sync_peers as peers
from tests.bench.command import add_device, parsed, parser, run_parts
from tests.bench.teacher_children import Child
from tests.bench.teacher_report import Figure, Part, Table
from tests.dist.helpers import free_port
from tests.random_models import save_random

_PARTS = ("qwen25_05b",)
_SIZES = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_TINY = {"vocab_size": 4096, "num_hidden_layers": 2}
_TRANSPORTS = ((GLOO, SHARED_MEMORY), (GLOO, IPC), (NCCL,))  # by the number of GPUs
# Loaded, verified, and kept in host memory as with rollout.max_restarts.
_WAYS, _KEPT = ((False, False, False), (True, False, False), (True, True, False)), (True, False, True)
_AND_KEPT = ", kept for restarts"
_MEMCPY = "memcpy"
_TENSORS = "tensor by tensor over gloo"
_LIMIT_S = 200.0  # of a command


class Pair:
    """Both processes, and the measurements by way: (seconds, CPU seconds of the sender, of the engine)."""

    def __init__(self, folder: Path, n_gpus: int, stack: ExitStack) -> None:
        """Start both, until `stack` ends; `n_gpus`: 0 = on the CPU, 1 = on the same GPU, 2 = on one each."""
        self.transports = _TRANSPORTS[n_gpus]
        gpus = [(None, None), (0, 0), (0, 1)][n_gpus]
        self.sender, self.engine = (
            stack.enter_context(Child(serve, folder, gpu, goodbye_s=10.0))
            for serve, gpu in zip((peers.sender, peers.engine), gpus, strict=True)
        )
        self.times: dict[str, list[tuple[float, float, float]]] = {}
        for peer in (self.sender, self.engine):
            peer.answer(_LIMIT_S)
        self.plan = self.sender.ask(("plan", ()), _LIMIT_S)[0]
        for transport in self.transports:
            port = free_port()
            for rank, peer in enumerate((self.sender, self.engine)):
                spec = GroupSpec(transport, "127.0.0.1", port, rank, 2, 120.0, 60.0)
                peer.post(("join", (transport, spec)))
            for peer in (self.sender, self.engine):
                peer.answer(_LIMIT_S)

    @property
    def n_bytes(self) -> int:
        return sum(bucket.n_bytes for bucket in self.plan)

    def both(self, way: str, at_sender: tuple[Any, ...], at_engine: tuple[Any, ...]) -> tuple[Any, Any]:
        """Run a command in each process at the same time; return both results."""
        self.engine.post((at_engine[0], at_engine[1:]))
        self.sender.post((at_sender[0], at_sender[1:]))
        sent, (begun, left, cpu) = self.sender.answer(_LIMIT_S)
        got, (also_begun, arrived, other_cpu) = self.engine.answer(_LIMIT_S)
        seconds = max(left, arrived) - min(begun, also_begun)
        self.times.setdefault(way, []).append((seconds, cpu, other_cpu))
        print(f"  {way}: {seconds:.2f} s, CPU {cpu:.2f} + {other_cpu:.2f} s", file=sys.stderr, flush=True)
        return sent, got

    def round(self) -> None:
        """Measure each way once. Raises AssertionError: the engine does not have the sender's tensors."""
        _, (begun, ended, cpu) = self.sender.ask((_MEMCPY, ()), _LIMIT_S)
        self.times.setdefault(_MEMCPY, []).append((ended - begun, cpu, 0.0))
        print(f"  memcpy: {ended - begun:.2f} s, CPU {cpu:.2f} s", file=sys.stderr, flush=True)
        for loads in (False, True) if GLOO in self.transports else ():
            self.step()
            self.both(_named(_TENSORS, loads, False), ("tensor_by_tensor",), ("tensor_by_tensor", self.plan, loads))
        for transport in self.transports:
            for loads, with_digests, keeps in _WAYS if transport != IPC else (*_WAYS, _KEPT):
                self.step()
                sent, got = self.both(
                    _named(transport, loads, with_digests) + (_AND_KEPT if keeps else ""),
                    ("transfer", transport, with_digests, keeps),
                    ("transfer", transport, self.plan, loads, with_digests),
                )
                assert sent == got, "the engine has other tensors than were sent"

    def step(self) -> None:
        self.sender.ask(("step", ()), _LIMIT_S)


def _named(transport: str, loads: bool, with_digests: bool) -> str:
    return transport + (", loaded" if loads else "") + (" and verified by digests" if with_digests else "")


def measure(rounds: int, n_gpus: int, *, tiny: bool) -> Part:
    sizes = _SIZES | _TINY if tiny else _SIZES
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        print("making the student", file=sys.stderr, flush=True)
        save_random(Path(name), "Qwen2", **sizes, head_dim=64, max_position_embeddings=128)
        print("starting the engine", file=sys.stderr, flush=True)
        pair = Pair(Path(name), n_gpus, stack)
        for number in range(rounds + 1):
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
            pair.round()
            if number == 0:
                pair.times.clear()
    seconds = {way: median(time for time, _, _ in times) for way, times in pair.times.items()}
    figures = _figures(seconds, n_gpus)
    if tiny:
        figures = [replace(figure, at_least=None) for figure in figures]
    gigabytes = pair.n_bytes / 1e9
    rows = [
        [way, f"{seconds[way]:.3f}", f"{gigabytes / seconds[way]:.2f}", f"{seconds[_MEMCPY] / seconds[way]:.0%}",
         *(f"{median(time[side] for time in times):.2f}" for side in (1, 2))]
        for way, times in pair.times.items()
    ]  # fmt: skip
    columns = ["way", "seconds", "GB/s", "of memcpy", "CPU s, sender", "CPU s, engine"]
    what = f"Sync of {gigabytes:.2f} GB from one process to a vLLM engine in another; median of {rounds} rounds."
    settings = {"rounds": rounds, "bytes": pair.n_bytes, "bucket_bytes": peers.BUCKET_BYTES} | sizes
    return Part(_PARTS[0], what, figures, [Table("weight sync", columns, rows)], settings)


def _figures(seconds: dict[str, float], n_gpus: int) -> list[Figure]:
    memcpy = seconds[_MEMCPY]
    if n_gpus == 1:
        on_card, by_host = _named(IPC, True, False), _named(GLOO, True, False)
        return [
            Figure(on_card, seconds[on_card], "s"),
            Figure("gloo / ipc, both loaded", seconds[by_host] / seconds[on_card], at_least=5.0),
            Figure("memcpy to pinned memory / ipc, loaded", memcpy / seconds[on_card]),
            Figure(on_card + _AND_KEPT, seconds[on_card + _AND_KEPT], "s"),
            Figure(_named(IPC, True, True), seconds[_named(IPC, True, True)], "s", note="digests equal"),
        ]
    if n_gpus:
        way = _named(_TRANSPORTS[n_gpus][-1], True, True)
        copied = Figure("memcpy to pinned memory", memcpy, "s")
        return [
            Figure(way, seconds[way], "s", note="digests equal"),
            Figure(f"memcpy / {way}", memcpy / seconds[way]),
            copied,
        ]
    shared = _named(SHARED_MEMORY, True, False)
    by_tensor = _named(_TENSORS, True, False)
    return [
        Figure("memcpy / shared_memory", memcpy / seconds[SHARED_MEMORY], at_least=0.3),
        Figure("memcpy / shared_memory, loaded", memcpy / seconds[shared], at_least=0.1, note="goal 0.25"),
        Figure("memcpy / shared_memory, loaded and verified", memcpy / seconds[_named(SHARED_MEMORY, True, True)]),
        Figure("tensor by tensor / shared_memory, both loaded", seconds[by_tensor] / seconds[shared], at_least=3.0),
        Figure("memcpy / gloo, loaded", memcpy / seconds[_named(GLOO, True, False)]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("tests.bench.bench_weight_sync", __doc__ or "", _PARTS, 5)
    made.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="with --device cuda; default: %(default)s")
    add_device(made, "cpu")
    args: argparse.Namespace = parsed(made, _PARTS, argv)
    n_gpus = args.gpus if args.device == "cuda" else 0
    return run_parts(args, lambda name: measure(args.rounds, n_gpus, tiny=args.tiny))


if __name__ == "__main__":
    sys.exit(main())
