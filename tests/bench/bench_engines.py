"""The engines of the teacher server, measured: which is faster on a CPU, what memory they need, how exact they are.

    python -m tests.bench.bench_engines [--json docs/results/engines_cpu.json] [--rounds 2]

Both real engines score the same sequences of the same model (random weights, 4 layers, V = 151,936,
float32) on one thread, each in a process of its own, in turns. About ten minutes, 3 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from teacher_server.engines.base import Engine, ScoreParams, Scores, TokenSequence, stream_rows
from teacher_server.engines.hf import HfEngine
from teacher_server.engines.load import EngineSettings, load_engine
from teacher_server.engines.topk import BLOCK, topk_two_stage
from teacher_server.engines.trivial import TrivialEngine
from teacher_server.wire.payload import TopKScores, rows_per_message

VOCAB = 151_936
HIDDEN = 512
ENGINES = ("hf", "vllm")
MEMORY_LIMIT_MIB = 512
SIGNALS = {
    "topk": ScoreParams("topk", k=64, wire="fp16"),
    "sampled": ScoreParams("sampled", wire="fp16"),
    "logits": ScoreParams("logits", wire="fp16"),
    "hidden": ScoreParams("hidden", wire="fp16"),
}


def save_bench_model(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def sequences(n: int, n_prompt: int, n_response: int) -> list[TokenSequence]:
    rng = np.random.default_rng(0)
    return [TokenSequence(rng.integers(0, VOCAB, n_prompt + n_response).astype(np.int32), n_prompt) for _ in range(n)]


def take(scores: list[Scores]) -> None:
    """Read every stream to its end as a worker does: four messages at a time."""
    for scored in scores:
        if not isinstance(scored, TopKScores | np.ndarray):
            for _ in stream_rows(scored, 4 * rows_per_message(scored.n_cols, scored.dtype)):
                pass


def best_of(n: int, call: Callable[[], object]) -> float:
    """Seconds of the fastest of `n` calls, after one to warm up."""
    call()
    times = []
    for _ in range(n):
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return min(times)


# In a process of its own: one engine


def memory_mib(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_memory(engine: Engine) -> dict[str, float]:
    """MiB beyond the loaded model while one sequence of 4096 tokens is scored, all but one of them response."""
    batch = sequences(1, 1, 4095)
    if isinstance(engine, HfEngine):  # its weights are a mapped file: what was not read yet is not resident yet
        for weight in engine._model.parameters():
            weight.sum()
    before = memory_mib("VmRSS")
    grown: dict[str, float] = {}
    for name, params in SIGNALS.items():
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at what is resident now
        take(engine.score(batch, params))
        grown[name] = round(memory_mib("VmHWM") - before, 1)
    return grown


def measure_speed(engine: Engine, rounds: int) -> dict[str, float]:
    """Milliseconds per 1000 tokens (prompt and response) of 16 sequences of 32 + 224 tokens."""
    batch = sequences(16, 32, 224)
    n_tokens = sum(len(sequence.token_ids) for sequence in batch)
    speed = {}
    for name, params in SIGNALS.items():
        seconds = best_of(rounds, lambda params=params: take(engine.score(batch, params)))  # type: ignore[misc]
        speed[name] = round(1e6 * seconds / n_tokens, 1)
    return speed


def measure_error(engine: Engine, reference: Path) -> dict[str, float]:
    """Largest |difference| of a logprob (of the logits and hidden signals: of a shifted logit) from plain HF."""
    batch = sequences(3, 20, 30)
    expected = np.load(reference)  # logprobs [R, V] of each sequence
    worst = dict.fromkeys(SIGNALS, 0.0)
    head = np.concatenate([rows for _, _, rows in stream_rows(engine.lm_head("fp32"), 4096)])
    for name, params in SIGNALS.items():
        exact = ScoreParams(params.signal, k=params.k, wire="fp32")
        for i, (sequence, scored) in enumerate(zip(batch, engine.score(batch, exact), strict=True)):
            want = expected[f"arr_{i}"]
            shifted = want - want.max(-1, keepdims=True)
            if isinstance(scored, TopKScores):
                off = scored.logprobs - np.take_along_axis(want, scored.ids, 1)
            elif isinstance(scored, np.ndarray):
                off = scored - want[np.arange(len(want)), sequence.token_ids[sequence.prompt_length :]]
            else:
                rows = np.concatenate([rows for _, _, rows in stream_rows(scored, 16)])
                if name == "hidden":
                    rows = rows @ head.T
                    rows -= rows.max(-1, keepdims=True)
                off = rows - shifted
            worst[name] = max(worst[name], float(np.abs(off).max()))
    return worst


def child(job: dict[str, Any]) -> dict[str, Any]:
    settings = EngineSettings(model=job["model"], engine=job["engine"], device="cpu", dtype="float32", max_tokens=4096)
    engine = load_engine(settings)
    # From the start of the process: imports are most of it.
    result: dict[str, Any] = {"load_s": round(time.time() - psutil.Process().create_time(), 1)}
    if job["what"] == "speed":
        result |= measure_speed(engine, job["rounds"])
    elif job["what"] == "memory":
        result |= measure_memory(engine)
    else:
        result |= measure_error(engine, Path(job["reference"]))
    return result


def run_child(**job: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.bench_engines", "--child", json.dumps(job)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=580)
    return json.loads(done.stdout.splitlines()[-1])


# In this process: the rest


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


def save_reference(model: str, file: Path) -> None:
    """Float32 logprobs [R, V] of plain, unbatched transformers."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    arrays = []
    with torch.inference_mode():
        for sequence in sequences(3, 20, 30):
            tokens = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
            logits = reference(input_ids=tokens).logits[0, sequence.prompt_length - 1 : -1]
            arrays.append(logits.log_softmax(-1).numpy())
    np.savez(file, *arrays)


def measure(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "what": f"Qwen3, 4 layers, H = {HIDDEN}, V = {VOCAB}, random weights, float32, one thread, CPU",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "topk_ms_per_row": measure_topk(5),
        "trivial_sequences_per_s": measure_trivial(),
    }
    with tempfile.TemporaryDirectory(prefix="bench_engines.") as folder:
        model, reference = str(Path(folder) / "model"), Path(folder) / "reference.npz"
        save_bench_model(Path(model))
        save_reference(model, reference)
        speeds: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
        for _ in range(rounds):
            for engine in ENGINES:
                speeds[engine].append(run_child(what="speed", engine=engine, model=model, rounds=3))
        result["ms_per_1k_tokens"] = {
            engine: {name: min(run[name] for run in runs) for name in ("load_s", *SIGNALS)}
            for engine, runs in speeds.items()
        }
        result["memory_mib_beyond_model"] = {
            engine: run_child(what="memory", engine=engine, model=model) for engine in ENGINES
        }
        result["max_abs_difference_to_hf"] = {
            engine: run_child(what="error", engine=engine, model=model, reference=str(reference)) for engine in ENGINES
        }
    return result


def show(result: dict[str, Any]) -> bool:
    """Print the tables; True if the limits hold."""
    print(result["what"])
    print(f"\n{'V':>8} {'k':>5} {'torch.topk':>11} {'two stages':>11}   ms a row")
    for row in result["topk_ms_per_row"]:
        print(
            f"{row['V']:8} {row['k']:5} {row['torch_topk_ms']:11.4f} {row['two_stage_ms']:11.4f}   {row['ratio']:.2f}x"
        )
    for key, digits in (("ms_per_1k_tokens", 0), ("memory_mib_beyond_model", 0), ("max_abs_difference_to_hf", 7)):
        print(f"\n{key:26}" + "".join(f"{name:>12}" for name in ("load_s", *SIGNALS)))
        for engine, values in result[key].items():
            cells = [f"{values['load_s']:12.1f}", *(f"{values[name]:12.{digits}f}" for name in SIGNALS)]
            print(f"{engine:26}" + "".join(cells))
    print(f"\ntrivial engine (no model): {result['trivial_sequences_per_s']} sequences of 330 tokens/s")
    memory = max(values[name] for values in result["memory_mib_beyond_model"].values() for name in SIGNALS)
    error = max(values[name] for values in result["max_abs_difference_to_hf"].values() for name in SIGNALS)
    held = memory <= MEMORY_LIMIT_MIB and error <= 1e-3
    print(f"\nworst: {memory:.0f} MiB beyond the model, difference {error:.1e}: {'held' if held else 'NOT HELD'}")
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here, too")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each engine, in turns; the best counts")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(child(args.child)))
        return 0
    result = measure(args.rounds)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if show(result) else 1


if __name__ == "__main__":
    sys.exit(main())
