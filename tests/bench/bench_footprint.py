"""Compare the memory of real ranks with the prediction of `gkd.memory.footprint`, on a model of 113 million parameters.

    python -m tests.bench.bench_footprint [--only megatron,fsdp2,...] [--json FILE] [--predict]
    DRY_CARD_VALUES=0 bash tests/dry_card/run.sh --gib 70 -- .venv-gpu/bin/python -m tests.bench.bench_footprint
        --allocator docs/results/footprint_cuda_allocator.json

A ratio is predicted / measured. The goal is 0.85 to 1.15. With --json a part replaces its rows in the file; --predict
measures nothing and compares the measurements in the file with the prediction of this version. An hour on two idle
cores; the processes take up to 5 GB. --allocator measures the file's cases again, in torch's allocator on a card, also
on one without values. Rows of a GPU that is named in them keep their measurement.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench.command import parsed, parser
from tests.footprint_case import SIZES, Case, measure, predict
from tests.results import write_results

_TWO = ("trainer.n_gpus_per_node=2",)
_FSDP = ("actor.strategy=fsdp2",)
_BF16 = ("model.dtype=bfloat16",)
_FULL = ("actor.recompute=full",)
_UNTIED = SIZES | {"tie_word_embeddings": False}
CASES: dict[str, tuple[Case, ...]] = {
    "megatron_parallel": (
        Case("TP 2", (*_TWO, "actor.tp=2")),
        Case("PP 2", (*_TWO, "actor.pp=2")),
        Case("DP 2", (*_TWO, "trainer.global_batch_size=8")),
        Case("TP 2, sequence parallel", (*_TWO, "actor.tp=2", "actor.sequence_parallel=true")),
    ),
    "megatron": (
        Case("one rank"),
        Case("recompute full", _FULL),
        Case("padded", ("actor.packing=false",)),
        Case("all logits at once", ("actor.fused_lm_head=false",)),
        Case("untied", (), _UNTIED),
    ),
    "megatron_bf16": (Case("one rank", _BF16), Case("recompute full", (*_BF16, *_FULL))),
    "fsdp2": (
        Case("one rank", _FSDP),
        Case("DP 2", (*_FSDP, *_TWO, "trainer.global_batch_size=8")),
        Case("recompute full", (*_FSDP, *_FULL)),
        Case("untied", _FSDP, _UNTIED),
        Case("all logits at once", (*_FSDP, "actor.fused_lm_head=false")),
        Case("bfloat16", (*_FSDP, *_BF16)),
        Case("bfloat16, LoRA of rank 16", (*_FSDP, *_BF16, "actor.lora.rank=16")),
    ),
}
# Context parallelism: one sequence a step, of a small model whose MLPs are wide, so that its layers outweigh libraries.
_SMALL = SIZES | {
    **{"vocab_size": 2000, "hidden_size": 128, "intermediate_size": 1536, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40960},
}
_ONE = ("trainer.global_batch_size=1", "actor.micro_batch_size=1", "data.max_prompt_length=1024")
_LONG = {
    "8k tokens": ("data.max_response_length=7168",),
    "8k tokens, recompute full": ("data.max_response_length=7168", *_FULL),
    "32k tokens, recompute full": ("data.max_response_length=31744", *_FULL),
}
for _backend in ("megatron", "fsdp2"):
    CASES[f"{_backend}_cp"] = tuple(
        Case(
            f"{name}, cp {cp}",
            (*_ONE, *settings, f"actor.strategy={_backend}", f"actor.cp={cp}", f"trainer.n_gpus_per_node={cp}"),
            _SMALL,
        )
        for name, settings in _LONG.items()
        for cp in (1, 2, 4)
    )
COLUMNS = ("part", "case", "rank", "measured peak, MB", "predicted, MB", "predicted / measured")


def rows_of(part: str) -> Iterator[list[Any]]:
    """Measure the cases of a part; yield a row for each, of the rank with the largest error."""
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder:
        for case in CASES[part]:
            worst = max(measure(case, Path(folder)), key=lambda one: abs(one.peak_ratio - 1))
            yield row(part, case.name, worst.rank, worst.peak / 1e6, worst.predicted.total_bytes / 1e6)


def row(part: str, case: str, rank: int, measured: float, predicted: float) -> list[Any]:
    """Return a row of `COLUMNS`."""
    return [part, case, rank, round(measured), round(predicted), round(predicted / measured, 3)]


def predicted_again(rows: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
    """Yield the rows with the prediction of this version; one of a case that is gone is left out."""
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder:
        for part, name, rank, measured, *_ in rows:
            for case in (case for case in CASES.get(part, ()) if case.name == name):
                stages = predict(case, Path(folder))
                n_bytes = stages[min(rank, len(stages) - 1)].total_bytes
                yield row(part, name, rank, measured, n_bytes / 1e6)


def measure_allocator(file: Path) -> int:
    """Write the peaks and predictions of a file's rows again, and print them. Exit code: 0."""
    found = json.loads(file.read_text())
    for one in found["rows"]:
        strategy, name, settings, sizes, *_ = one
        case = Case(name, (f"actor.strategy={strategy}", *settings), found["sizes"] | sizes)
        with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder:
            if not name.startswith("H200"):
                (measured,) = measure(case, Path(folder), device="cuda")
                one[4:6] = measured.saved, measured.peak
            (predicted,) = predict(case, Path(folder), "cuda")
        one[6:] = predicted.total_bytes, round(predicted.total_bytes / one[5], 3)
        print(strategy, name, *one[4:], flush=True)
    write_results(file, found, levels=2)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a ratio missed the goal."""
    made = parser("tests.bench.bench_footprint", __doc__ or "", CASES)
    made.add_argument("--allocator", type=Path, metavar="FILE", help="measure its cases again on this card")
    made.add_argument("--predict", action="store_true", help="compare what --json has measured; measure nothing")
    args = parsed(made, CASES, argv)
    if args.allocator is not None:
        return measure_allocator(args.allocator)
    found: dict[str, Any] = {"what": "", "columns": COLUMNS, "rows": []}
    if args.json is not None and args.json.exists():
        found = json.loads(args.json.read_text())
    if args.predict:
        rows = list(predicted_again(found["rows"]))
    else:
        only = args.only.split(",")
        rows = [one for one in found["rows"] if one[0] not in only]
        for part in only:
            rows += rows_of(part)
    print("\n".join("  ".join(map(str, one)) for one in rows))
    if args.json is not None:
        write_results(args.json, {**found, "rows": rows}, levels=2)
    return 1 if any(abs(one[-1] - 1) > 0.15 for one in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
