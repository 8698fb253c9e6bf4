"""Measure training steps of random students on one GPU: share of the peak, compared with HF + AdamW.

    python -m tests.gpu.bench_student_cuda [--only 0.6b,1.5b,7b,offload,long] [--device cuda|cpu] [--json FILE]
                                           [--tokens 8192] [--rounds 10] [--peak-tflops X] [--trace DIR]

bfloat16, `--tokens` of 8 sequences: a batch for the plain step, one pack for ours. A step's useful work is 6 operations
a parameter and token for the matrices, and attention's, causal, forward and backward; what is recomputed does not count
(model FLOPs utilisation, as in PaLM, arXiv:2204.02311, appendix B). The plain step keeps bfloat16 weights and states.
7b: layers of Qwen2.5-7B's shape, 8 of 28, because an 80 GB card does not hold all states. offload: FSDP2 with host
memory against without. long: 1.5b, `--tokens` of one sequence. The peak of torch's allocator is compared with what
preflight predicts for these settings. --tiny, and on a CPU: small shapes in float32, and the peak is that of a matrix
product in the same run.
"""

from __future__ import annotations

import gc
import gzip
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from gkd.data.batching import make_micro_batches
from tests.bench.command import add_device, parsed, parser, run_parts
from tests.bench.student_case import MIXES, TOPK, PlainStep, make_student, only_rank, save_model, sequences
from tests.bench.teacher_report import Figure, Part, Table
from tests.footprint_case import Case, predict
from tests.gpu.peaks import peak_tflops, share_of_peak
from tests.gpu.timing import median_ms
from tests.results import write_results

COMMON = {"vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960, "tie_word_embeddings": True}
_7B = {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 152_064}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 8} | _7B,
}
SHAPES["0.6b"]["num_key_value_heads"], SHAPES["1.5b"]["num_key_value_heads"] = 8, 2
SHAPES |= {"offload": SHAPES["0.6b"], "long": SHAPES["1.5b"]}
_TINY = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip
GOAL = 0.45
SPEED_GOAL = 1.4  # tokens/s / those of plain Hugging Face
# The states of 7b fill most of a card, and the plain step's logits the rest.
VARIANTS = {"offload": ("fsdp2", "fsdp2, host memory"), "7b": ("megatron",), "long": ("fsdp2", "megatron")}


def useful_flops(sizes: dict[str, Any], lengths: Sequence[int], n_loss_tokens: int) -> float:
    """Return the useful FLOPs of one step. The LM head computes the loss rows only."""
    q, kv = (sizes[heads] * sizes["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    layer = sizes["hidden_size"] * (2 * q + 2 * kv + 3 * sizes["intermediate_size"])
    matrices = 6.0 * layer * sizes["num_hidden_layers"] * sum(lengths)
    head = 6.0 * sizes["hidden_size"] * sizes["vocab_size"] * n_loss_tokens
    # Two products of [n, d] with [d, n] forward, four backward, half of each masked away.
    attention = 6.0 * q * sizes["num_hidden_layers"] * sum(n * n for n in lengths)
    return matrices + head + attention


def matmul_tflops(device: str, dtype: torch.dtype, n: int) -> float:
    """Return the rate of one square product of size n."""
    a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / median_ms(lambda: a @ b, 10, device=device) / 1e9


def measure(name: str, args: Any) -> Part:
    on_card = args.device == "cuda"
    dtype = torch.float32 if args.tiny else torch.bfloat16
    sizes = COMMON | SHAPES[name] | (_TINY if args.tiny else {})
    n_tokens = 256 if args.tiny else args.tokens
    n_sequences = 1 if name == "long" else 8
    MIXES["one_pack"] = lambda rng: [(n_tokens // 64, n_tokens // n_sequences - n_tokens // 64)] * n_sequences
    rollouts, scores = sequences("one_pack", sizes["vocab_size"])
    packed, padded = (
        make_micro_batches(rollouts, scores, micro_batch_size=n_sequences, packed=is_packed)
        for is_packed in (True, False)
    )
    flops = useful_flops(sizes, [r.n_tokens for r in rollouts], packed[0].n_loss_tokens)
    product = matmul_tflops(args.device, dtype, 1024 if args.tiny else 8192)
    peak = product if args.tiny else args.peak_tflops or peak_tflops(torch.cuda.get_device_name())
    variants = VARIANTS.get(name, ("hf", "fsdp2", "megatron"))
    table: dict[str, tuple[float, float, float, float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder, only_rank(args.device):
        model = Path(folder) / "tied"  # where `predicted_gib` expects it
        save_model(model, device=args.device, dtype=dtype, **sizes)
        for variant in variants:
            if on_card:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if on_card else 0
            step = _step(variant, model, dtype, args.device, packed, padded)
            seconds = median_ms(step, args.rounds, warm_up=2, device=args.device) / 1e3
            gib = (torch.cuda.max_memory_allocated() - before) / 2**30 if on_card else 0.0
            expected_gib = predicted_gib(variant, Path(folder), n_tokens, n_sequences, dtype, args.device)
            rates = (sum(r.n_tokens for r in rollouts) / seconds, flops / seconds / 1e12)
            table[variant] = (seconds, *rates, gib, expected_gib)
            print(f"  {variant}: {seconds:.3f} s, {rates[1]:.1f} TFLOP/s", file=sys.stderr, flush=True)
            if args.trace is not None:
                trace(step, args.trace / f"{name}_{variant.replace(', ', '_')}")
            del step
            gc.collect()  # the students have reference cycles
    rows = [(variant, *numbers) for variant, numbers in table.items()]
    columns = ("step", "seconds", "tokens/s", "TFLOP/s", "peak GiB", "predicted GiB")
    peaks = f"peak {'unknown' if peak is None else f'{peak:.1f}'} TFLOP/s, a product {product:.1f}"
    what = f"Training steps of {n_tokens} tokens, {str(dtype)[6:]}; {peaks}."
    return Part(
        name,
        what,
        _figures(table, args.tiny, peak),
        [Table("medians", columns, rows)],
        {"device": args.device, **sizes},
    )


def predicted_gib(
    variant: str, folder: Path, n_tokens: int, n_sequences: int, dtype: torch.dtype, device: str
) -> float:
    """Return the peak of these steps in torch's allocator as preflight predicts it; 0 for the plain step."""
    if variant == "hf":
        return 0.0
    strategy, _, where = variant.partition(", ")
    prompt = n_tokens // 64
    settings = (
        f"data.max_prompt_length={prompt}", f"data.max_response_length={n_tokens // n_sequences - prompt}",
        f"trainer.global_batch_size={n_sequences}", f"actor.micro_batch_size={n_sequences}", f"teacher.topk={TOPK}",
        f"model.dtype={str(dtype)[6:]}", f"actor.strategy={strategy}",
        f"actor.fsdp_cpu_offload={str(bool(where)).lower()}",
    )  # fmt: skip
    config_json = json.loads((folder / "tied" / "config.json").read_text())
    (actor,) = predict(Case(variant, settings, config_json), folder, device)
    # This step has one micro-batch, and no gradients yet when fsdp2 computes the loss. The prediction is for several.
    missing = actor.parts.get("gradients", 0) if strategy == "fsdp2" and actor.parts["logits"] else 0
    return (actor.total_bytes - missing) / 2**30


def _figures(
    table: dict[str, tuple[float, float, float, float, float]], tiny: bool, peak: float | None
) -> list[Figure]:
    ours = [variant for variant in table if variant != "hf"]
    off = {variant: abs(table[variant][4] / table[variant][3] - 1) for variant in ours if not tiny}
    memory = [
        Figure(f"{variant}: predicted peak memory: off by", value, at_most=0.15) for variant, value in off.items()
    ]
    if "megatron" not in table:
        resident, offloaded = table["fsdp2"], table["fsdp2, host memory"]
        figures = [Figure("FSDP2 step, host memory / resident", offloaded[0] / resident[0])]
        if not tiny:
            figures.append(Figure("FSDP2 peak memory, host memory / resident", offloaded[3] / resident[3], at_most=0.8))
        return figures + memory
    figures = []
    for backend in (backend for backend in ("megatron", "fsdp2") if backend in table):
        figures.append(share_of_peak(f"{backend}: MFU", table[backend][2], peak, at_least=None if tiny else GOAL))
        if "hf" in table:
            ratio = table[backend][1] / table["hf"][1]
            goal = None if tiny else SPEED_GOAL
            figures.append(Figure(f"{backend}: tokens/s / plain Hugging Face", ratio, at_least=goal))
    return figures + memory


def _step(
    variant: str, folder: Path, dtype: torch.dtype, device: str, packed: Sequence[Any], padded: Sequence[Any]
) -> Callable[[], float]:
    if variant == "hf":
        return PlainStep(folder, list(padded), dtype, device)
    where = "cuda:0" if device == "cuda" else "cpu"
    backend, _, host = variant.partition(", ")
    more = {"compiles": "auto", "cpu_offload": bool(host)} if backend == "fsdp2" else {}
    student = make_student(backend, folder, dtype=dtype, device=where, **more)
    return lambda: float(student.train_step(packed).loss)


def trace(step: Callable[[], Any], file: Path) -> None:
    """Profile one step: `file`.json.gz for a viewer of traces, `file`.json with ms and launches of each kernel."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with profile() as profiled:
        step()
    profiled.export_chrome_trace(f"{file}.json.gz")
    found: dict[str, tuple[float, int]] = {}
    for event in json.loads(gzip.decompress(Path(f"{file}.json.gz").read_bytes()))["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            ms, n = found.get(event["name"], (0.0, 0))
            found[event["name"]] = ms + event["dur"] / 1e3, n + 1
    rows = sorted(((ms, n, name) for name, (ms, n) in found.items()), reverse=True)
    write_results(Path(f"{file}.json"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.bench_student_cuda", __doc__ or "", SHAPES, rounds=10)
    made.add_argument("--peak-tflops", type=float, metavar="X", help="dense bfloat16 peak; default: by the card's name")
    made.add_argument("--tokens", type=int, default=8192)
    made.add_argument("--trace", type=Path, metavar="DIR", help="also profile a step of each variant")
    add_device(made, "cuda")
    args = parsed(made, SHAPES, argv)
    return run_parts(args, lambda name: measure(name, args))


if __name__ == "__main__":
    sys.exit(main())
