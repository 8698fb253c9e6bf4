"""Compare the loss's two passes over the logits on a CUDA device with the lower bound of the memory bandwidth.

    python -m tests.gpu.bench_loss_cuda [--json docs/results/loss_cuda.json] [--rounds 20]

The bound: the logits are read twice and the gradient is written once, at the bandwidth that a large copy reaches in the
same run. Everything is in place, as in training. About a minute, 8 GB of GPU memory at the default size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from gkd.loss.row_kernels import RowKernels, TorchRows
from gkd.loss.triton_rows import TritonRows
from tests.gpu.timing import median_ms

TOKENS, VOCAB, TOP_K = 8192, 151_936, 64
CONFIGURATIONS = [(block, warps) for block in (4096, 8192, 16384) for warps in (4, 8, 16)]


def copy_bytes_per_ms(logits: Tensor, rounds: int) -> float:
    """Return the bytes that a copy of the logits reads and writes per millisecond."""
    other = torch.empty_like(logits)
    return 2 * logits.nbytes / median_ms(lambda: other.copy_(logits), rounds)


def passes_ms(kernels: RowKernels, logits: Tensor, rounds: int) -> dict[str, float]:
    """Return the time of each pass. The second overwrites the logits, but no branch depends on their values."""
    n = len(logits)
    log_normalizer, _ = kernels.statistics(logits, 1.0)
    arguments = {
        "columns": torch.randint(0, logits.shape[1], (n, TOP_K), device=logits.device),
        "column_grad": torch.randn(n, TOP_K, device=logits.device) / n,
        "row_grad": torch.full((n,), 1.0 / n, device=logits.device),
        "log_normalizer": log_normalizer,
    }
    return {
        "statistics_ms": median_ms(lambda: kernels.statistics(logits, 1.0), rounds),
        "write_gradient_ms": median_ms(
            lambda: kernels.write_gradient(logits, logits, **arguments, temperature=1.0), rounds
        ),
    }


def measure(rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    logits = torch.empty(TOKENS, VOCAB, dtype=torch.bfloat16, device="cuda")
    bandwidth = copy_bytes_per_ms(logits.normal_(std=4.0), rounds)
    floor = 3 * logits.nbytes / bandwidth
    kernels: dict[str, RowKernels] = {"triton": TritonRows(), "torch": TorchRows()}
    kernels |= {f"triton, block {b}, {w} warps": TritonRows(b, w) for b, w in CONFIGURATIONS}
    rows = []
    for name, kernel in kernels.items():
        times = passes_ms(kernel, logits.normal_(std=4.0), rounds)
        both = sum(times.values())
        rows.append({"kernels": name, **times, "both_ms": both, "times_the_floor": both / floor})
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "tokens": TOKENS,
        "vocab": VOCAB,
        "top_k": TOP_K,
        "dtype": "bfloat16",
        "rounds": rounds,
        "copy_gb_per_s": bandwidth / 1e6,
        "floor_ms": floor,
        "passes": rows,
    }


def as_text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['device']}, torch {result['torch']}, CUDA {result['cuda']}, triton {result['triton']}",
        f"T = {result['tokens']}, V = {result['vocab']}, K = {result['top_k']}, {result['dtype']}; "
        f"copy {result['copy_gb_per_s']:.0f} GB/s, so the floor is {result['floor_ms']:.3f} ms",
        f"{'':<32}{'statistics':>12}{'gradient':>12}{'both, ms':>12}{'x floor':>10}",
    ]
    for row in result["passes"]:
        times = f"{row['statistics_ms']:>12.3f}{row['write_gradient_ms']:>12.3f}{row['both_ms']:>12.3f}"
        lines.append(f"{row['kernels']:<32}{times}{row['times_the_floor']:>10.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.bench_loss_cuda", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("docs/results/loss_cuda.json"), metavar="FILE")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each; default: %(default)s")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("it measures a CUDA device, and torch sees none")
    result = measure(args.rounds)
    print(as_text(result))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
