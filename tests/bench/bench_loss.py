"""Measure the losses on CPU: time and memory of forward + backward, compared with common implementations.

    python -m tests.bench.bench_loss [--only topk_32000,head] [--json FILE] [--rounds N] [--quick]

Each measurement is one pass in a fresh process, so that its peak of memory is its own. The variants take
turns; a ratio is the median over the rounds of ratios within a round. A run replaces the parts of the JSON
file that it measured. About fifteen minutes on two idle cores, 12 GB of memory; see `cpu_of_others` in the
JSON for how idle they were.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from statistics import median

from tests.bench.command import check_same_loss, parsed, parser, run_parts
from tests.bench.loss_case import TOPK, Case, Measured, measure
from tests.bench.loss_variants import CHUNK_BYTES
from tests.bench.teacher_report import Figure, Part, Table

_MIB = 1 << 20
_NAMES = {
    "dense": "dense autograd: log_softmax, gather",
    "usual": "usual vocab-parallel, out of place",
    "usual_in_place": "usual vocab-parallel, in place",
    "ours": "ours",
    "trl": "as TRL's generalized_jsd_loss",
    "fused": "LM head and loss fused",
    "unfused": "LM head, then loss",
    "in_place": "head's gradient added in place",
    "added": "head's gradient computed, then added",
}
Rounds = dict[str, list[Measured]]


def topk(vocabulary: int, rounds: int, rows: int) -> Part:
    """The forward KL on the teacher's top-k."""
    variants = ("dense", "usual", "usual_in_place", "ours")
    cases = {variant: Case("topk", variant, rows, vocabulary) for variant in variants}
    found = _rounds(cases | {"memcpy": Case("memcpy", "", rows, vocabulary)}, rounds)
    name = _NAMES["ours"]
    figures = [
        Figure(f"{name}: time / usual", _ratio(found, "ours", "usual"), at_most=0.5),
        Figure(f"{name}: extra memory / usual", _extra(found["ours"]) / _extra(found["usual"]), at_most=0.25),
        Figure(f"{name}: time / usual in place", _ratio(found, "ours", "usual_in_place")),
        Figure(f"{name}: time / dense", _ratio(found, "ours", "dense")),
        # A copy reads and writes once; the loss has to read twice and write once.
        Figure(f"{name}: time / floor", _ratio(found, "ours", "memcpy") / 1.5, note="floor: read, read, write"),
    ]
    what = f"Forward KL on the teacher's top-{TOPK}, from logits [{rows}, {vocabulary}], float32, forward + backward."
    return Part(f"topk_{vocabulary}", what, figures, [_table(found)], {"rounds": rounds, "Liger-Kernel": _LIGER})


def jsd(vocabulary: int, rounds: int, rows: int) -> Part:
    """The JSD of whole distributions."""
    found = _rounds({variant: Case("jsd", variant, rows, vocabulary) for variant in ("trl", "ours")}, rounds)
    figures = [
        Figure("ours: time / TRL's", _ratio(found, "ours", "trl")),
        Figure("ours: extra memory / TRL's", _extra(found["ours"]) / _extra(found["trl"])),
    ]
    what = f"JSD of the student's and the teacher's logits, [{rows}, {vocabulary}] both, float32, forward + backward."
    return Part(f"jsd_{vocabulary}", what, figures, [_table(found)], {"rounds": rounds, "Liger-Kernel": _LIGER})


def head(vocabulary: int, rounds: int, rows: Sequence[int]) -> Part:
    """LM head and loss."""
    figures, tables, peaks = [], [], []
    for n in rows:
        cases = {variant: Case("head", variant, n, vocabulary) for variant in ("dense", "unfused", "fused")}
        found = _rounds(cases, rounds)
        tables.append(_table(found, f"{n} rows"))
        figures.append(Figure(f"{n} rows: fused time / unfused", _ratio(found, "fused", "unfused")))
        figures.append(Figure(f"{n} rows: fused time / dense", _ratio(found, "fused", "dense")))
        peaks.append(_extra(found["fused"]))
    note = f"logits of a chunk: {CHUNK_BYTES // _MIB} MiB"
    growth = (peaks[-1] - peaks[0]) / _MIB
    at_most = 0.1 * CHUNK_BYTES / _MIB  # nothing of the size of even a part of the logits
    figures.append(Figure(f"fused: extra at {rows[-1]} rows - at {rows[0]}", growth, "MiB", at_most=at_most, note=note))
    what = f"LM head and forward KL on the top-{TOPK}, hidden size 896, vocabulary {vocabulary}, float32."
    return Part("head", what, figures, tables, {"rounds": rounds})


def head_gradient(vocabulary: int, rounds: int, rows: int) -> Part:
    """Accumulation of the LM head's gradient over micro-batches."""
    found = _rounds({name: Case("head_gradient", name, rows, vocabulary) for name in ("added", "in_place")}, rounds)
    bytes_of_head = 4 * 896 * vocabulary
    figures = [
        Figure("in place: time / computed, then added", _ratio(found, "in_place", "added")),
        *(
            Figure(f"{name}: extra memory / that of the head", _extra(found[name]) / bytes_of_head)
            for name in ("in_place", "added")
        ),
    ]
    what = f"LM head and forward KL of {rows} rows, float32, the head's gradient added to a buffer of gradients."
    return Part("head_gradient", what, figures, [_table(found)], {"rounds": rounds})


# Its kernels are Triton's, and Triton compiles for GPUs; this benchmark is about the CPU.
_LIGER = "not run: no GPU"


def _rounds(cases: dict[str, Case], rounds: int) -> Rounds:
    found: Rounds = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            found[name].append(measure(case))
    check_same_loss({name: runs[0].loss for name, runs in found.items() if cases[name].kind != "memcpy"})
    return found


def _ratio(found: Rounds, name: str, other: str) -> float:
    return median(a.seconds / b.seconds for a, b in zip(found[name], found[other], strict=True))


def _extra(runs: Sequence[Measured]) -> float:
    return median(run.extra_bytes for run in runs)


def _table(found: Rounds, title: str = "") -> Table:
    columns = ("variant", "median, s", "fastest, s", "extra memory, MiB")
    rows = []
    for name, runs in found.items():
        seconds = [run.seconds for run in runs]
        if name == "memcpy":
            rows.append(("floor: read, read, write at memcpy's speed", 1.5 * median(seconds), 1.5 * min(seconds), 0.0))
        else:
            rows.append((_NAMES[name], median(seconds), min(seconds), round(_extra(runs) / _MIB, 1)))
    return Table(f"{title}{': ' if title else ''}extra: beyond inputs and their gradients", columns, rows)


# (rounds, quick) -> what it found
PARTS: dict[str, Callable[[int, bool], Part]] = {
    "topk_32000": lambda rounds, quick: topk(32_000, rounds, 256 if quick else 2048),
    "topk_151936": lambda rounds, quick: topk(151_936, rounds, 256 if quick else 2048),
    # Fewer rows: TRL's formulation takes ten times the memory of the logits.
    "jsd_32000": lambda rounds, quick: jsd(32_000, rounds, 128 if quick else 1024),
    "jsd_151936": lambda rounds, quick: jsd(151_936, rounds, 64 if quick else 512),
    "head_gradient": lambda rounds, quick: head_gradient(151_936, rounds, 64 if quick else 512),
    "head": lambda rounds, quick: head(151_936, rounds, (256, 512) if quick else (256, 1024, 2048)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.bench.bench_loss", __doc__ or "", PARTS, rounds=5)
    made.add_argument("--quick", action="store_true", help="few rows, two rounds, to see that it runs; noisy")
    args = parsed(made, PARTS, argv)
    return run_parts(args, lambda name: PARTS[name](2 if args.quick else args.rounds, args.quick))


if __name__ == "__main__":
    sys.exit(main())
