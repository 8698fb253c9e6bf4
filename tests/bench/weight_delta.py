"""Measure which weights a step changes, and whether sending only those would pay: part `delta` of `bench_weight_sync`.

Real steps of the product's student in bfloat16 with float32 Adam states: the share of the exported values that change,
and the bytes of a list of them (an index of 4 bytes and a value of 2). Also the cost of finding them, against a copy.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from tests.bench.student_case import SIZES, make_student, save_model, sequences
from tests.bench.teacher_report import Figure, Part, Table

_RATES = (1e-6, 1e-5, 1e-4)
_N_WARM, _N_STEPS = 3, 3
_PAGE = 2048  # values of 2 bytes in 4 KiB
_N_TIMED = 128 << 20  # values


def measure_delta(rounds: int) -> Part:
    from gkd.data.batching import make_micro_batches

    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        rollouts, scores = sequences("even")
        batches = make_micro_batches(rollouts[:8], scores[:8], micro_batch_size=8, max_tokens=0, packed=True)
        for rate in _RATES:
            student = make_student("fsdp2", Path(folder), dtype=torch.bfloat16, lr=rate)
            for _ in range(_N_WARM):
                student.train_step(batches)
            values, pages = zip(*(_changed(student, batches) for _ in range(_N_STEPS)), strict=True)
            rows.append([f"{rate:g}", f"{mean(values):.1%}", f"{mean(pages):.1%}", f"{mean(values) * 6 / 2:.1%}"])
            print(f"  lr {rate:g}: {mean(values):.2%} of the values changed", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    find_s, copy_s = _costs(rounds)
    columns = ["lr", "values changed", "4 KiB pages with a change", "bytes of the list / all bytes"]
    figures = [Figure("seconds to find the changes / seconds of a copy", find_s / copy_s)]
    what = f"Steps in bfloat16 after {_N_WARM} others, mean of {_N_STEPS}; {_N_TIMED * 2 >> 20} MiB to find or copy."
    return Part("delta", what, figures, [Table("changes of a step", columns, rows)], {"rounds": rounds} | SIZES)


def _exported(student: Any) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).view(torch.int16).clone() for _, tensor in student.export("merged")])


def _changed(student: Any, batches: Any) -> tuple[float, float]:
    """Make one step; return the share of values that it changed, and of 4 KiB pages."""
    before = _exported(student)
    student.train_step(batches)
    differs = before != _exported(student)
    pages = differs[: len(differs) // _PAGE * _PAGE].view(-1, _PAGE).any(1)
    return float(differs.float().mean()), float(pages.float().mean())


def _costs(rounds: int) -> tuple[float, float]:
    """Return the seconds to list the changes of 2% of the values, and to copy all of them; medians."""
    old = torch.randint(-32768, 32767, (_N_TIMED,), dtype=torch.int16)
    new, target = old.clone(), old.clone()
    new[::50] += 1

    def timed(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return median(times)

    def find() -> torch.Tensor:
        where = (old != new).nonzero().squeeze(1)
        return torch.cat([where.int().view(torch.int16), new[where]])

    return timed(find), timed(lambda: target.copy_(new))
