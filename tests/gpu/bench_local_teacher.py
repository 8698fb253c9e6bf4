"""Measure the pass of a local teacher of 7B on one GPU, with its weights in host memory and on the card.

    python -m tests.gpu.bench_local_teacher [--only host,resident] [--device cuda|cpu] [--json FILE] [--rounds 3]
                                            [--batch-tokens 16384,32768] [--trace DIR]

The pass is that of `tests.gpu.bench_scale`: 128 sequences of 256 and 512 tokens, top-64. A figure is the share of the
card's peak: two operations a parameter and token, and attention's. The weights are random. On a CPU: a tiny model.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gkd.actor.frozen.model import FrozenModel
from gkd.types import Rollout
from teacher_server.engines.base import ScoreParams
from tests.bench.command import add_device, parsed, parser, run_parts
from tests.bench.student_case import SIZES, save_model
from tests.bench.teacher_report import Figure, Part, Table
from tests.device import VARIABLE, environment
from tests.dist.helpers import group_of_one
from tests.gpu.bench_student_cuda import COMMON, SHAPES, trace, useful_flops
from tests.gpu.peaks import peak_tflops, share_of_peak
from tests.gpu.timing import median_ms

PLACES = {"host": True, "resident": False}
PARAMS = (ScoreParams("topk", k=64),)


def measure(place: str, folder: Path, sizes: dict[str, Any], args: Any) -> Part:
    """Build the teacher with its weights in `place`, and score the batch with each size of a micro-batch."""
    n, prompt, response = (8, 16, 32) if args.tiny else (128, 256, 512)
    rng, none = np.random.default_rng(0), np.zeros(0, np.float32)

    def ids(count: int) -> np.ndarray:
        return rng.integers(2, sizes["vocab_size"], count).astype(np.int32)

    batch = [Rollout(i, 0, ids(prompt), ids(response), none, (), "length", on_policy=False) for i in range(n)]
    tflop = useful_flops(sizes, [prompt + response] * n, n * response) / 3 / 1e12  # no backward pass
    peak = None if args.tiny else peak_tflops(torch.cuda.get_device_name())
    dtype = torch.float32 if args.tiny else torch.bfloat16
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    figures: list[Figure] = []
    rows: list[tuple[Any, ...]] = []
    for n_tokens in map(int, args.batch_tokens.split(",")):
        model = FrozenModel(
            folder, device=device, dtype=dtype, key="teacher.path", cpu_offload=PLACES[place], max_batch_tokens=n_tokens
        )

        def score(model: FrozenModel = model) -> Any:
            return model.score(batch, PARAMS)

        seconds = median_ms(score, args.rounds, warm_up=1, device=args.device) / 1e3
        rows.append((n_tokens, seconds, sum(r.n_tokens for r in batch) / seconds, tflop / seconds))
        figures.append(share_of_peak(f"{place}, micro-batches of {n_tokens} tokens: MFU", tflop / seconds, peak))
        print(f"  {place}, {n_tokens}: {seconds:.3f} s", file=sys.stderr, flush=True)
        if args.trace is not None:
            trace(score, args.trace / f"teacher_{place}_{n_tokens}")
        del score, model
        gc.collect()
    columns = ("tokens of a micro-batch", "seconds", "tokens/s", "TFLOP/s")
    what = f"One pass over {n} sequences of {prompt} + {response} tokens, top-64, {str(dtype)[6:]}."
    return Part(place, what, figures, [Table("passes", columns, rows)], {"device": args.device, **sizes})


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.bench_local_teacher", __doc__ or "", PLACES, rounds=3)
    made.add_argument("--batch-tokens", default="16384", metavar="N,..", help="default: %(default)s")
    made.add_argument("--trace", type=Path, metavar="DIR", help="also profile a pass")
    add_device(made, "cuda")
    args = parsed(made, PLACES, argv)
    sizes = SIZES if args.tiny else COMMON | SHAPES["7b"] | {"num_hidden_layers": 28}
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as name, environment({VARIABLE: args.device}), group_of_one():
        folder = Path(name)
        save_model(folder, device=args.device, dtype=torch.float32 if args.tiny else torch.bfloat16, **sizes)
        if args.device == "cuda":
            torch.cuda.empty_cache()  # `save_model` made float32 weights
        return run_parts(args, lambda place: measure(place, folder, sizes, args))


if __name__ == "__main__":
    sys.exit(main())
