"""Measure one engine of `bench_engines` in a process of its own: `python -m tests.bench.engine_case JOB`.

prints a JSON line.
"""

from __future__ import annotations

import json
import sys
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
from teacher_server.wire.payload import TopKScores, rows_per_message

VOCAB = 151_936
SIGNALS = {
    "topk": ScoreParams("topk", k=64, wire="fp16"),
    "sampled": ScoreParams("sampled", wire="fp16"),
    "logits": ScoreParams("logits", wire="fp16"),
    "hidden": ScoreParams("hidden", wire="fp16"),
}


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


def memory_mib(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_memory(engine: Engine) -> dict[str, float]:
    """MiB beyond the loaded model while one sequence of 4096 tokens is scored, all but one of them response."""
    batch = sequences(1, 1, 4095)
    if torch.cuda.is_initialized():
        return _device_memory(engine, batch)
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


def _device_memory(engine: Engine, batch: list[TokenSequence]) -> dict[str, float]:
    before, grown = torch.cuda.memory_allocated(), dict[str, float]()
    for name, params in SIGNALS.items():
        torch.cuda.reset_peak_memory_stats()
        take(engine.score(batch, params))
        grown[name] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
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
    dtype = "float32" if job["device"] == "cpu" else "bfloat16"
    settings = EngineSettings(
        model=job["model"], engine=job["engine"], device=job["device"], dtype=dtype, max_tokens=4096
    )
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


if __name__ == "__main__":
    print(json.dumps(child(json.loads(sys.argv[1]))))
