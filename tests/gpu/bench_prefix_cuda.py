"""Find the shortest prompt that the Transformers engine should compute once for several responses, on one GPU.

    python -m tests.gpu.bench_prefix_cuda [--device cuda|cpu] [--json FILE] [--rounds 5]

A random model of 1.2B scores 4 prompts with 8 responses of 256 tokens each, top-64, with the prompt computed once and
with each response, in turns. `teacher_server.engines.hf_prefix.SHORTEST_PROMPT` is where sharing begins to be faster.
On a CPU: a tiny model and short responses.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from teacher_server.engines.base import ScoreParams, TokenSequence
from teacher_server.engines.hf import HfEngine
from tests.bench.command import add_device, parsed, parser, run_parts
from tests.bench.student_case import SIZES, save_model
from tests.bench.teacher_report import Figure, Part, Table
from tests.gpu.bench_student_cuda import COMMON, SHAPES
from tests.gpu.timing import median_ms

N_PROMPTS, N_SAMPLES = 4, 8
PROMPTS = {"cuda": (64, 128, 256, 512, 1024, 2048), "cpu": (16, 64, 256)}


def measure(args: Any) -> Part:
    """Score with and without sharing at each length of the prompts."""
    on_card = args.device == "cuda"
    sizes = COMMON | SHAPES["1.5b"] if on_card else SIZES
    dtype, n_response = (torch.bfloat16, 256) if on_card else (torch.float32, 16)
    rows, figures, rng = [], [], np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as name:
        save_model(Path(name), device=args.device, dtype=dtype, **sizes)
        engine = HfEngine(name, dtype=str(dtype)[6:], device=args.device, max_tokens=4096)

        def tokens(n: int) -> np.ndarray:
            return rng.integers(2, sizes["vocab_size"], n).astype(np.int32)

        for n_prompt in PROMPTS[args.device]:
            prompts = [tokens(n_prompt) for _ in range(N_PROMPTS)]
            batch = [
                TokenSequence(np.concatenate([prompt, tokens(n_response)]), n_prompt)
                for prompt in prompts
                for _ in range(N_SAMPLES)
            ]

            def score(block: int, batch: list[TokenSequence] = batch) -> Any:
                engine.prefix_block = block
                return engine.score(batch, ScoreParams("topk", k=64, with_sampled=True))

            pairs = [
                [median_ms(lambda b=block: score(b), 1, warm_up=0, device=args.device) for block in (0, 1)]
                for _ in range(args.rounds + 1)
            ][1:]
            whole, shared = (statistics.median(pair[i] for pair in pairs) for i in range(2))
            speedup = statistics.median(a / b for a, b in pairs)
            error = max(float(np.abs(a.sampled - b.sampled).max()) for a, b in zip(score(0), score(1), strict=True))
            rows.append((n_prompt, whole, shared, speedup, error))
            figures.append(Figure(f"{n_prompt} tokens: whole / shared", speedup, "x"))
    columns = ("prompt tokens", "ms, whole", "ms, shared", "speedup", "largest difference, nats")
    what = f"{N_PROMPTS} prompts with {N_SAMPLES} responses of {n_response} tokens each, {str(dtype)[6:]}."
    return Part("prefix", what, figures, [Table("medians", columns, rows)], {"device": args.device, **sizes})


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.bench_prefix_cuda", __doc__ or "", ("prefix",), rounds=5)
    add_device(made, "cuda")
    args = parsed(made, ("prefix",), argv)
    return run_parts(args, lambda _: measure(args))


if __name__ == "__main__":
    sys.exit(main())
