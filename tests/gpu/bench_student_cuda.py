"""Measure training steps of a random Qwen3-shaped student on one GPU: share of the peak, compared with HF + AdamW.

    python -m tests.gpu.bench_student_cuda [--peak-tflops 989] [--tokens 8192] [--json docs/results/student_cuda.json]

bfloat16, `--tokens` of 8 sequences: a batch for the plain step, one pack for ours. A step's useful work is 6 operations
a parameter and token for the matrices, and attention's, causal, forward and backward; what is recomputed does not count
(model FLOPs utilisation, as in PaLM, arXiv:2204.02311, appendix B). The plain step keeps bfloat16 weights and states.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from gkd.data.batching import make_micro_batches
from tests.bench.student_case import MIXES, PlainStep, make_student, save_model, sequences
from tests.gpu.timing import median_ms

# Qwen3-0.6B.
SIZES = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}


def useful_flops(lengths: Sequence[int], n_loss_tokens: int) -> float:
    """Return the useful FLOPs of one step. The LM head computes the loss rows only."""
    s = SIZES
    q, kv = s["num_attention_heads"] * s["head_dim"], s["num_key_value_heads"] * s["head_dim"]
    layer = s["hidden_size"] * (2 * q + 2 * kv + 3 * s["intermediate_size"])
    matrices = 6.0 * layer * s["num_hidden_layers"] * sum(lengths)
    head = 6.0 * s["hidden_size"] * s["vocab_size"] * n_loss_tokens
    # Two products of [n, d] with [d, n] forward, four backward, half of each masked away.
    attention = 6.0 * q * s["num_hidden_layers"] * sum(n * n for n in lengths)
    return matrices + head + attention


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bfloat16 peak; default: H100, H200 SXM")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dtype, table = torch.bfloat16, {}
    MIXES["one_pack"] = lambda rng: [(128, args.tokens // 8 - 128)] * 8
    rollouts, scores = sequences("one_pack", SIZES["vocab_size"])
    (packed,) = make_micro_batches(rollouts, scores, micro_batch_size=8, packed=True)
    (padded,) = make_micro_batches(rollouts, scores, micro_batch_size=8, packed=False)
    flops = useful_flops([r.n_tokens for r in rollouts], packed.n_loss_tokens)
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder:
        save_model(Path(folder), **SIZES)
        dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        for name in ("hf", "megatron", "fsdp2"):
            step: Callable[[], float]
            if name == "hf":
                step = PlainStep(Path(folder), [padded], dtype, "cuda")
            else:
                student = make_student(name, Path(folder), dtype=dtype, device="cuda:0")
                step = lambda student=student: float(student.train_step([packed]).loss)  # noqa: E731
            torch.cuda.reset_peak_memory_stats()
            seconds = median_ms(step, args.rounds, warm_up=3) / 1e3
            table[name] = {
                "step_s": seconds,
                "tokens_per_s": sum(r.n_tokens for r in rollouts) / seconds,
                "mfu": flops / seconds / (args.peak_tflops * 1e12),
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            }
            print(f"{name:9}" + "  ".join(f"{key} {value:10.4g}" for key, value in table[name].items()), flush=True)
            del step
            torch.cuda.empty_cache()
        dist.destroy_process_group()
    if args.json:
        where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
        report = {"machine": where, "tokens": args.tokens, "peak_tflops": args.peak_tflops, "steps": table}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
