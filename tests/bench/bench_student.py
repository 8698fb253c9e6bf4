"""Measure the student on CPU: training steps compared with plain Hugging Face ones, and packing.

    python -m tests.bench.bench_student [--only speed,packing,families] [--json FILE] [--rounds N]

The variants of a part take turns in one process, one thread; a ratio is the median over the rounds of ratios within a
round. A run replaces the parts of the JSON file that it measured. About five minutes on an idle core; see
`cpu_of_others` in the JSON for how idle it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from statistics import median

from tests.bench.command import check_same_loss, parsed, parser, run_parts
from tests.bench.student_case import Case, Measured, measure
from tests.bench.teacher_report import Figure, Part, Table

BACKENDS = ("megatron", "fsdp2")


def speed(rounds: int) -> Part:
    """Tokens a second, as a share of a plain training step's."""
    found = _measured(Case(("hf", *(f"{backend}:padded" for backend in BACKENDS)), "even", rounds))
    figures = [
        Figure(f"{backend}: tokens/s / plain Hugging Face", _ratio(found, "hf", f"{backend}:padded"), at_least=0.9)
        for backend in BACKENDS
    ]
    what = (
        "Qwen3, 5.8M parameters, float32, 16 sequences of 256 tokens in micro-batches of 8: forward, top-64 KL on the "
        "response rows, backward, clipping, AdamW. The plain step is the HF model with dense log-softmax and autograd."
    )
    return Part("speed", what, figures, [_table(found)], {"rounds": rounds})


def packing(rounds: int) -> Part:
    """Packed against padded."""
    figures = []
    tables = []
    for backend in BACKENDS:
        variants = (f"{backend}:padded", backend, f"{backend}:budget:padded", f"{backend}:budget")
        found = _measured(Case(variants, "long_tailed", rounds))
        figures += [
            Figure(
                f"{backend}: packed / padded, 8 sequences a micro-batch",
                _ratio(found, f"{backend}:padded", backend),
                at_least=1.8,
            ),
            Figure(
                f"{backend}: packed / padded, 2048 tokens a micro-batch",
                _ratio(found, f"{backend}:budget:padded", f"{backend}:budget"),
                note="padded: sequences of like length together",
            ),
        ]
        tables.append(_table(found, backend))
    what = (
        "Tokens a second, packed as a multiple of padded. 48 sequences: prompts of 16 to 64 tokens, responses "
        "lognormal around 80 (sigma 0.9), at most 1024."
    )
    return Part("packing", what, figures, tables, {"rounds": rounds})


def families(rounds: int) -> Part:
    """Packed against padded for sliding windows, and for recurrent layers, which run once for each sequence."""
    variants = ("fsdp2:padded", "fsdp2", "fsdp2:budget:padded", "fsdp2:budget")
    figures = []
    tables = []
    for model in ("Gemma3", "Qwen3_5"):
        found = _measured(Case(variants, "long_tailed", rounds, model=model))
        for text, how in (("8 sequences", ""), ("2048 tokens", ":budget")):
            ratio = _ratio(found, f"fsdp2{how}:padded", f"fsdp2{how}")
            figures.append(Figure(f"{model}: packed / padded, {text} a micro-batch", ratio))
        tables.append(_table(found, model))
    what = (
        "As packing, with fsdp2 alone: Gemma 3 with windows of 64 tokens, Qwen3.5 with three of four layers recurrent."
    )
    return Part("families", what, figures, tables, {"rounds": rounds})


def _measured(case: Case) -> Measured:
    found = measure(case)
    check_same_loss(found.losses)
    return found


def _ratio(found: Measured, slow: str, fast: str) -> float:
    return median(a / b for a, b in zip(found.seconds[slow], found.seconds[fast], strict=True))


def _table(found: Measured, title: str = "steps") -> Table:
    rows = [
        (variant, median(seconds), min(seconds), found.n_tokens / median(seconds))
        for variant, seconds in found.seconds.items()
    ]
    return Table(title, ("variant", "median, s", "fastest, s", "tokens/s"), rows)


PARTS: dict[str, Callable[[int], Part]] = {"speed": speed, "packing": packing, "families": families}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    args = parsed(parser("tests.bench.bench_student", __doc__ or "", PARTS, rounds=7), PARTS, argv)
    return run_parts(args, lambda name: PARTS[name](args.rounds))


if __name__ == "__main__":
    sys.exit(main())
