"""Compare the loss's two passes over the logits with the lower bound of the memory bandwidth.

    python -m tests.gpu.bench_loss_cuda [--json docs/results/loss_cuda.json] [--rounds 20] [--device cuda|cpu]

The bound: the logits are read twice and the gradient is written once, at the bandwidth that a large copy reaches in the
same run. Everything is in place, as in training. 8 GB of GPU memory. On a CPU: torch's kernels, small.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from gkd.loss.row_kernels import RowGradient, RowKernels, TorchRows
from tests.bench.command import add_device, parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table
from tests.gpu.timing import median_ms

VOCAB, TOP_K = 151_936, 64
GOAL = 1.2  # times the bound, of the kernels that training uses on a GPU


def copy_bytes_per_ms(logits: Tensor, rounds: int) -> float:
    """Return the bytes that a copy of the logits reads and writes per millisecond."""
    other = torch.empty_like(logits)
    return 2 * logits.nbytes / median_ms(lambda: other.copy_(logits), rounds, device=logits.device.type)


def passes_ms(kernels: RowKernels, logits: Tensor, rounds: int) -> tuple[float, float]:
    """Return the time of each pass. The second overwrites the logits, but no branch depends on their values."""
    n, device = len(logits), logits.device
    log_normalizer, _ = kernels.statistics(logits, 1.0)
    by = RowGradient(
        columns=torch.randint(0, logits.shape[1], (n, TOP_K), device=device),
        column_grad=torch.randn(n, TOP_K, device=device) / n,
        row_grad=torch.full((n,), 1.0 / n, device=device),
        log_normalizer=log_normalizer,
        temperature=1.0,
    )
    return (
        median_ms(lambda: kernels.statistics(logits, 1.0), rounds, device=device.type),
        median_ms(lambda: kernels.write_gradient(logits, logits, by), rounds, device=device.type),
    )


def kernels_of(device: str) -> tuple[str, RowKernels]:
    """Return the kernels of training, and their name."""
    if device == "cpu":
        return "torch", TorchRows()
    from gkd.loss.triton_rows import TritonRows

    return "triton", TritonRows()


def measure(device: str, rounds: int, *, tiny: bool) -> Part:
    torch.manual_seed(0)
    n_tokens = 64 if tiny else 8192
    logits = torch.empty(n_tokens, VOCAB, dtype=torch.bfloat16, device=device)
    bandwidth = copy_bytes_per_ms(logits.normal_(std=4.0), rounds)
    floor = 3 * logits.nbytes / bandwidth
    name, kernels = kernels_of(device)
    statistics, gradient = passes_ms(kernels, logits.normal_(std=4.0), rounds)
    both = statistics + gradient
    figures = [
        Figure(f"both passes / three-pass floor ({name})", both / floor, at_most=None if tiny else GOAL),
        Figure("bandwidth of the copy", bandwidth / 1e6, "GB/s"),
    ]
    columns = ("kernels", "statistics, ms", "gradient, ms", "both, ms", "x floor")
    table = Table("medians", columns, [(name, statistics, gradient, both, both / floor)])
    what = f"The loss's passes over logits [{n_tokens}, {VOCAB}], bfloat16, in place, {TOP_K} columns with a gradient."
    return Part("loss", what, figures, [table], {"device": device, "rounds": rounds})


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.bench_loss_cuda", __doc__ or "", ("loss",), rounds=20)
    add_device(made, "cuda")
    args = parsed(made, ("loss",), argv)
    return run_parts(args, lambda _: measure(args.device, args.rounds, tiny=args.tiny))


if __name__ == "__main__":
    sys.exit(main())
