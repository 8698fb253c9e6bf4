"""Compare the student's packed attention with SDPA, sequence by sequence: error, time, and share of the peak.

    python -m tests.gpu.bench_attention [--only attention,fa3,fa4] [--device cuda|cpu] [--rounds 10] [--json FILE]

Forward and backward of one layer of Qwen2.5-7B's shape (28 heads, 4 of keys and values, 128 each) on one pack of 16k
tokens. cuda: bfloat16; the error is compared with that of SDPA, both against float32; parts `fa3` and `fa4` compare the
installed kernels of `actor.attention` with torch's. cpu: float32, small.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import restore_flash_attention_impl

from gkd.actor.common.attention import IMPLEMENTATIONS, Heads, causal_attention, use_flash_attention
from tests.bench.command import add_device, parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table
from tests.gpu.peaks import peak_tflops, share_of_peak
from tests.gpu.timing import median_ms

HEADS, KV_HEADS, HEAD_DIM = 28, 4, 128
# name -> lengths of the pack's sequences
PACKS = {
    "card": {"16 x 1k": [1024] * 16, "4 x 4k": [4096] * 4, "1 x 16k": [16_384]},
    "tiny": {"4 x 64": [64] * 4, "1 x 256": [256]},
}


def by_sequence(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    parts = zip(*(t.split(list(lengths), dim=2) for t in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*p, is_causal=True, enable_gqa=True) for p in parts], dim=2)


def with_gradients(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Sequence[Tensor], weights: Tensor
) -> list[Tensor]:
    """Return the output and the gradients of its weighted sum."""
    output = attention(inputs[0], inputs[1], inputs[2])
    return [output.detach(), *torch.autograd.grad(output, inputs, weights)]


def worst(actual: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest relative error (Frobenius norm) of the output and the three gradients."""
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(actual, exact, strict=True))


def _inputs(lengths: Sequence[int], device: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return queries, keys and values of one pack, and weights of the output, whose sum is differentiated."""
    torch.manual_seed(0)
    shapes = [(1, heads, sum(lengths), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    return inputs, torch.randn(shapes[0], device=device, dtype=dtype)


def _flops(lengths: Sequence[int]) -> float:
    """Return the useful operations of forward and backward: half of each square of scores."""
    return 6.0 * HEADS * HEAD_DIM * sum(n * n for n in lengths)


def measure(device: str, rounds: int, peak: float | None, *, tiny: bool) -> Part:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    errors, times, speeds = [], [], []
    rows: list[tuple[str | float, ...]] = []
    for name, lengths in PACKS["tiny" if tiny else "card"].items():
        inputs, weights = _inputs(lengths, device, dtype)
        borders = torch.tensor([0, *lengths], device=device).cumsum(0).int()

        def ours(q: Tensor, k: Tensor, v: Tensor, borders: Tensor = borders, longest: int = max(lengths)) -> Tensor:
            return causal_attention(q, k, v, borders, max_length=longest)

        def plain(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] = lengths) -> Tensor:
            return by_sequence(q, k, v, lengths)

        # One sequence of the pack exactly: float32 has no flash kernel, and 16k x 16k scores a head do not fit.
        first = lengths[0] if lengths[0] <= 4096 else None
        found = [with_gradients(ours, inputs, weights), with_gradients(plain, inputs, weights)]
        if first is not None:
            cut = [t.detach()[:, :, :first].float().requires_grad_() for t in inputs]
            exact = with_gradients(_dense, cut, weights[:, :, :first].float())
            error, plain_error = (worst([t[:, :, :first] for t in one], exact) for one in found)
        else:  # compared with SDPA itself
            error, plain_error = worst(found[0], [t.float() for t in found[1]]), float("nan")
        ms, plain_ms = (
            median_ms(partial(with_gradients, f, inputs, weights), rounds, device=device) for f in (ours, plain)
        )
        flops = _flops(lengths)
        errors.append(error / plain_error if first is not None and plain_error else 1.0)
        times.append(ms / plain_ms)
        speeds.append(flops / ms / 1e9)
        rows.append((name, error, "-" if first is None else plain_error, ms, plain_ms, speeds[-1]))
    figures = [
        Figure("time, packed / SDPA by sequence, worst", max(times), at_most=None if tiny else 1.2),
        Figure("error, packed / SDPA, worst", max(errors), at_most=2.0 if tiny else 1.5),
        Figure("largest error", max(float(row[1]) for row in rows), at_most=2e-2 if device == "cuda" else 1e-5),
    ]
    if not tiny:
        figures.append(share_of_peak("share of the peak, longest sequences", speeds[-1], peak, at_least=0.25))
    columns = ("pack", "error", "SDPA's error", "ms", "SDPA's ms", "TFLOP/s")
    what = "Forward and backward of one layer, causal, heads shared 7 to 1; useful FLOPs only (half of each square)."
    return Part("attention", what, figures, [Table("", columns, rows)], {"device": device, "rounds": rounds})


def measure_kernels(attention: str, rounds: int, peak: float | None) -> Part:
    """Compare the kernels of `actor.attention` with torch's FlashAttention-2."""
    packs = [(name, lengths, *_inputs(lengths, "cuda", torch.bfloat16)) for name, lengths in PACKS["card"].items()]

    def times() -> list[float]:
        found = []
        for _, lengths, inputs, weights in packs:
            borders = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
            ours = partial(causal_attention, cu_seqlens=borders, max_length=max(lengths))
            found.append(median_ms(partial(with_gradients, ours, inputs, weights), rounds))
        return found

    torch_ms = times()
    use_flash_attention(attention, [Heads(HEADS, KV_HEADS, HEAD_DIM)], torch.bfloat16, torch.device("cuda"))
    rows: list[tuple[str | float, ...]] = []
    ratios, speeds = [], []
    for (name, lengths, *_), ms, before in zip(packs, times(), torch_ms, strict=True):
        speeds.append(_flops(lengths) / ms / 1e9)
        ratios.append(ms / before)
        rows.append((name, ms, before, speeds[-1]))
    restore_flash_attention_impl()
    figures = [
        Figure(f"time, {attention} / FlashAttention-2, worst", max(ratios)),
        share_of_peak("share of the peak, longest sequences", speeds[-1], peak),
    ]
    columns = ("pack", "ms", "FlashAttention-2's ms", "TFLOP/s")
    what = f"Forward and backward of one layer with actor.attention={attention}."
    return Part(attention, what, figures, [Table("", columns, rows)], {"rounds": rounds})


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return float32 attention of one sequence with an explicit mask."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.bench_attention", __doc__ or "", ("attention",), rounds=10)
    made.add_argument("--peak-tflops", type=float, metavar="X", help="dense bfloat16 peak; default: by the card's name")
    add_device(made, "cuda")
    args = parsed(made, ("attention", *IMPLEMENTATIONS), argv)
    if args.device == "cpu" and args.only != "attention":
        made.error(f"--only {args.only}: the CPU has no other attention")

    peak = args.peak_tflops or (peak_tflops(torch.cuda.get_device_name()) if args.device == "cuda" else None)

    def part(name: str) -> Part:
        if name == "attention":
            return measure(args.device, args.rounds, peak, tiny=args.tiny)
        return measure_kernels(name, args.rounds, peak)

    return run_parts(args, part)


if __name__ == "__main__":
    sys.exit(main())
