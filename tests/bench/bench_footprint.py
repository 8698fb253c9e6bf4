"""Compare the memory of real ranks with the prediction of `gkd.memory.footprint`, on a model of 113 million parameters.

    python -m tests.bench.bench_footprint [--only megatron,fsdp2,...] [--json FILE] [--device cuda]

Memory is counted from after the imports. A ratio is predicted / measured, of the rank with the largest error. The goal:
0.85 to 1.15. A run replaces the parts of the JSON file that it measured. An hour on two idle cores; the processes take
up to 5 GB together. With --device cuda (one GPU, cases of one rank) torch's allocator is read (not tested).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gkd.cluster.gpus import gpu_memory_bytes
from gkd.memory.footprint import footprint
from tests.bench.command import parsed, parser, run_parts
from tests.bench.footprint_case import SIZES, Case, Measured, case_config, measure, save_model
from tests.bench.footprint_memory import ENVIRONMENT
from tests.bench.teacher_report import Figure, Part, Table

_TWO = ("trainer.n_gpus_per_node=2",)
_FSDP = ("actor.strategy=fsdp2",)
_BF16 = ("model.dtype=bfloat16",)
_FULL = ("actor.recompute=full",)
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
        Case("untied", tied=False),
    ),
    "megatron_bf16": (Case("one rank", _BF16), Case("recompute full", (*_BF16, *_FULL))),
    "fsdp2": (
        Case("one rank", _FSDP),
        Case("DP 2", (*_FSDP, *_TWO, "trainer.global_batch_size=8")),
        Case("recompute full", (*_FSDP, *_FULL)),
        Case("untied", _FSDP, tied=False),
        Case("all logits at once", (*_FSDP, "actor.fused_lm_head=false")),
        Case("offload (host memory is the device's here)", (*_FSDP, "actor.fsdp_cpu_offload=true")),
        Case("bfloat16", (*_FSDP, *_BF16)),
        Case("bfloat16, LoRA of rank 16", (*_FSDP, *_BF16, "actor.lora.rank=16")),
    ),
}
# Context parallelism: one sequence a step, of a small model whose MLPs are wide, so that its layers outweigh libraries.
_SMALL = {
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
            sizes=_SMALL,
            alone=f"{name}, cp 1",
        )
        for name, settings in _LONG.items()
        for cp in (1, 2, 4)
    )
# Prompts and responses of the engine's case; together they fill nine tenths of its cache on the CPU.
N_PROMPTS = 9
KV_CACHE_MIB = {"cpu": 128, "cuda": 0}  # on a GPU the prediction is what vLLM takes by itself
ENGINE = (
    "data.max_prompt_length=448",
    "data.max_response_length=32",
    f"trainer.global_batch_size={N_PROMPTS}",
    f"rollout.max_num_seqs={N_PROMPTS}",
)
PARTS = (*CASES, "rollout")


def students(name: str, device: str) -> Part:
    """Training steps of every case of a part."""
    figures: list[Figure] = []
    rows: list[tuple[str | float, ...]] = []
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder:
        for case in CASES[name]:
            if device != "cpu" and any(key.startswith("trainer.n_gpus") for key in case.overrides):
                continue
            found = measure(case, Path(folder), device=device)
            worst = max(found, key=lambda one: abs(one.peak_ratio - 1))
            print(f"  {case.name}: {worst.peak_ratio:.3f}", file=sys.stderr, flush=True)
            figures.append(off_by(case.name, worst.peak_ratio))
            rows += [_row(case.name, one) for one in ([worst] if case.alone else found)]
            seconds[case.name] = sum(one.cpu_s for one in found)
            if len(found) == 2 and case.alone:
                ratio = seconds[case.name] / seconds[case.alone]
                figures.append(Figure(f"{case.name}: CPU of both ranks / of one", ratio, at_most=1.15))
    sizes = ("state, MB", "predicted", "ratio", "peak, MB", "predicted", "ratio", "saved, MB")
    columns = ("case", "rank", *sizes, "CPU s of a step", "wall s")
    what = (
        "Training steps on real ranks, two sequences of 256 tokens in a micro-batch, two micro-batches a step. "
        "State: after a step; fsdp2 has no gradients then. Peak: within the steps. Saved: by a forward pass. "
        "Parts with cp: one sequence a step."
    )
    return Part(name, what, figures, [Table("", columns, rows)], {**CASES[name][0].sizes, "device": device})


def rollout(device: str) -> Part:
    """The real engine, its cache nearly full."""
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as name:
        cache = f"rollout.kv_cache_mib={KV_CACHE_MIB[device]}"
        config = case_config(Case("engine", (*ENGINE, cache)), Path(name), device)
        save_model(Path(config.model.path), tied=True)
        shape = json.loads((Path(config.model.path) / "config.json").read_text())
        (predicted,) = (part for part in footprint(config, shape) if part.role == "rollout")
        from gkd.rollout.vllm.start import CPU_ENV

        command = [sys.executable, "-m", "tests.bench.footprint_engine", config.model.path, device, str(N_PROMPTS)]
        command.append(str(KV_CACHE_MIB[device]))
        done = subprocess.run(
            command,
            env=os.environ | CPU_ENV | ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"},
            cwd=Path(__file__).resolve().parents[2],
            stdout=subprocess.PIPE,
            text=True,
            timeout=900.0,
            check=True,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    if device == "cuda":  # it takes its share; the context in it is not torch's
        card = gpu_memory_bytes(None)
        assert card is not None, "nvidia-smi does not tell the card's memory"
        wanted = round(config.rollout.gpu_memory_utilization * card) - predicted.parts["context"]
    else:
        momentary = predicted.parts["activations"] + predicted.parts["logits"]
        wanted = predicted.parts["weights"] + predicted.parts["kv_cache"] + momentary
    parts = ", ".join(f"{part} {size / 1e6:.0f}" for part, size in predicted.parts.items())
    what = f"One vLLM engine that answers {N_PROMPTS} prompts of 448 tokens; no weight sync. Predicted, MB: {parts}."
    row = (round(found["state"] / 1e6), round(found["peak"] / 1e6), round(wanted / 1e6))
    table = Table("", ("engine up, MB", "peak, MB", "predicted"), [row])
    return Part("rollout", what, [off_by("engine", wanted / found["peak"])], [table], {**SIZES, "device": device})


def off_by(name: str, ratio: float) -> Figure:
    """Return how far off a prediction is, either way, with the goal of 0.85 to 1.15: `Figure` takes one bound."""
    return Figure(f"{name}: off by", abs(ratio - 1), at_most=0.15, note=f"predicted / measured = {ratio:.3f}")


def _row(name: str, one: Measured) -> tuple[str | float, ...]:
    state = (round(one.state / 1e6), round(one.predicted_state / 1e6), round(one.state_ratio, 3))
    return (
        name,
        one.rank,
        *state,
        round(one.peak / 1e6),
        round(one.predicted.total_bytes / 1e6),
        round(one.peak_ratio, 3),
        round(one.saved / 1e6),
        round(one.cpu_s, 2),
        round(one.wall_s, 2),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made: argparse.ArgumentParser = parser("tests.bench.bench_footprint", __doc__ or "", PARTS, rounds=1)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    args = parsed(made, PARTS, argv)
    return run_parts(args, lambda name: rollout(args.device) if name == "rollout" else students(name, args.device))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
