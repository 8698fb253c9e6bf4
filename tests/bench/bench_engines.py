"""The engines of the teacher server, measured: which is faster on a CPU, what memory they need, how exact they are.

    python -m tests.bench.bench_engines [--json docs/results/engines_cpu.json] [--rounds 2] [--device cpu|cuda]
                                        [--only topk,speed,memory,error]

Both real engines score the same sequences of the same model (random weights, 4 layers, V = 151,936,
float32) on one thread, each in a process of its own, in turns. About ten minutes, 3 GB of memory. On a GPU in bfloat16:
its error is that of rounded weights and activations, with twice that of plain transformers as its limit, and its memory
that of torch's allocator.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from teacher_server.engines.base import ScoreParams
from teacher_server.engines.signals import BLOCK, topk_two_stage
from tests.bench.command import add_device, in_fresh_process, parsed, parser
from tests.bench.engine_case import SIGNALS, VOCAB, best_of, error_limit, save_reference, sequences
from tests.bench.teacher_report import Figure, Part, as_json, as_text, machine
from tests.random_models import save_random
from tests.service.trivial_engine import TrivialEngine

HIDDEN = 512
SIZES = {
    **{"intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"head_dim": 64, "max_position_embeddings": 4096, "initializer_range": 0.1},
}
ENGINES = ("hf", "vllm")
MEMORY_LIMIT_MIB = 512
PARTS = ("topk", "speed", "memory", "error")


def _measured(**job: Any) -> dict[str, Any]:
    return in_fresh_process("tests.bench.engine_case", job, threads=1, timeout_s=580.0)


def measure_topk(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds a row of both ways, 64 rows of normal numbers."""
    table = []
    for n_cols in (8_192, 32_003, VOCAB):
        rows = torch.randn(64, n_cols, generator=torch.Generator().manual_seed(0))
        for k in (1, 8, 64, 256):
            if n_cols // BLOCK < k:
                continue
            plain = best_of(rounds, lambda rows=rows, k=k: torch.topk(rows, k))  # type: ignore[misc]
            two = best_of(rounds, lambda rows=rows, k=k: topk_two_stage(rows, k, BLOCK))  # type: ignore[misc]
            table.append(
                {"V": n_cols, "k": k, "torch_topk_ms": plain * 1e3 / 64, "two_stage_ms": two * 1e3 / 64}
                | {"ratio": plain / two}
            )
    return table


def measure_trivial() -> float:
    """Sequences of 330 tokens (266 rows, k = 8) per second through the engine without a model."""
    engine, batch = TrivialEngine(vocab_size=VOCAB, max_tokens=4096), sequences(64, 64, 266)
    return round(64 / best_of(20, lambda: engine.score(batch, ScoreParams("topk", k=8))))


def measure(rounds: int, device: str, parts: Sequence[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    dtype = "float32, one thread, CPU" if device == "cpu" else f"bfloat16, {torch.cuda.get_device_name()}"
    result: dict[str, Any] = {
        "what": f"Qwen3, 4 layers, H = {HIDDEN}, V = {VOCAB}, random weights, {dtype}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    if "topk" in parts:
        result |= {"topk_ms_per_row": measure_topk(5), "trivial_sequences_per_s": measure_trivial()}
    with tempfile.TemporaryDirectory(prefix="bench_engines.") as folder:
        model, reference = str(Path(folder) / "model"), Path(folder) / "reference.npz"
        save_random(Path(model), vocab_size=VOCAB, hidden_size=HIDDEN, **SIZES)
        job = {"model": model, "device": device, "reference": str(reference), "rounds": 3}
        if "speed" in parts:
            speeds: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
            for _ in range(rounds):
                for engine in ENGINES:
                    speeds[engine].append(_measured(what="speed", engine=engine, **job))
            result["ms_per_1k_tokens"] = {
                engine: {name: min(run[name] for run in runs) for name in ("load_s", *SIGNALS)}
                for engine, runs in speeds.items()
            }
        if "error" in parts:
            result["plain_error"] = save_reference(model, reference, device=device)
        for part, key in (("memory", "memory_mib_beyond_model"), ("error", "max_abs_difference_to_hf")):
            if part in parts:
                result[key] = {engine: _measured(what=part, engine=engine, **job) for engine in ENGINES}
    return result


def figures_of(result: dict[str, Any], device: str) -> list[Figure]:
    """Return the worst number of each engine and part."""
    error = error_limit(device, result.get("plain_error", 0.0))
    limits = {"max_abs_difference_to_hf": error, "memory_mib_beyond_model": float(MEMORY_LIMIT_MIB)}
    units = {"max_abs_difference_to_hf": "nats", "memory_mib_beyond_model": "MiB"}
    names = {"max_abs_difference_to_hf": "largest error of a logprob", "memory_mib_beyond_model": "beyond the model"}
    return [
        Figure(f"{engine}: {names[key]}", max(values[name] for name in SIGNALS), units[key], at_most=limit)
        for key, limit in limits.items()
        for engine, values in result.get(key, {}).items()
    ] + [
        Figure(f"{engine}: top-64 of 1000 tokens", values["topk"], "ms")
        for engine, values in result.get("ms_per_1k_tokens", {}).items()
    ]


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    print(result["what"])
    if "topk_ms_per_row" in result:
        print(f"\n{'V':>8} {'k':>5} {'torch.topk':>11} {'two stages':>11}   ms a row")
        for row in result["topk_ms_per_row"]:
            ways = f"{row['torch_topk_ms']:11.4f} {row['two_stage_ms']:11.4f}"
            print(f"{row['V']:8} {row['k']:5} {ways}   {row['ratio']:.2f}x")
        print(f"\ntrivial engine (no model): {result['trivial_sequences_per_s']} sequences of 330 tokens/s")
    for key, digits in (("ms_per_1k_tokens", 0), ("memory_mib_beyond_model", 0), ("max_abs_difference_to_hf", 7)):
        if key in result:
            print(f"\n{key:26}" + "".join(f"{name:>12}" for name in ("load_s", *SIGNALS)))
        for engine, values in result.get(key, {}).items():
            cells = [f"{values['load_s']:12.1f}", *(f"{values[name]:12.{digits}f}" for name in SIGNALS)]
            print(f"{engine:26}" + "".join(cells))


def main() -> int:
    """Exit code: 1 if a limit did not hold."""
    made = parser("tests.bench.bench_engines", __doc__ or "", PARTS, rounds=2)
    add_device(made, "cpu")
    args = parsed(made, PARTS, None)
    result = measure(args.rounds, args.device, args.only.split(","))
    figures = figures_of(result, args.device)
    show(result)
    part = Part("engines", result["what"], figures, (), {"device": args.device, "rounds": args.rounds})
    print(f"\n{as_text(part)}")
    if args.json is not None:
        result["parts"] = {"engines": as_json(part, machine(), {})}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(figure.met is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
