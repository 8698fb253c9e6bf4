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

from teacher_server.engines.base import Engine, RowStream, ScoreParams, Scores, TokenSequence, stream_rows
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


def sequences(n: int, n_prompt: int, n_response: int, vocab: int = VOCAB) -> list[TokenSequence]:
    rng = np.random.default_rng(0)
    return [TokenSequence(rng.integers(0, vocab, n_prompt + n_response).astype(np.int32), n_prompt) for _ in range(n)]


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


def save_reference(model: str, file: Path, *, device: str, vocab: int = VOCAB) -> float:
    """Save float32 logprobs [R, V] of plain, unbatched transformers; return its largest error in the engines' dtype.

    On the CPU the engines compute in float32, too: 0.
    """
    exact = _plain_logits(model, torch.float32, device, vocab)
    np.savez(file, *(logits.log_softmax(-1).numpy() for logits in exact))
    if device == "cpu":
        return 0.0
    rounded = _plain_logits(model, torch.bfloat16, device, vocab)
    return max(
        float((form(a) - form(b)).abs().max())
        for a, b in zip(rounded, exact, strict=True)
        for form in (_shifted, _logprobs)
    )


def error_limit(device: str, plain_error: float) -> float:
    """Return the limit of an engine's error. In bfloat16 rounding depends on depth and width of the model."""
    return 1e-3 if device == "cpu" else 2.0 * plain_error


def _plain_logits(model: str, dtype: torch.dtype, device: str, vocab: int) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().to(device)
    found = []
    with torch.inference_mode():
        for sequence in sequences(3, 20, 30, vocab):
            tokens = torch.from_numpy(sequence.token_ids.astype(np.int64))[None].to(device)
            found.append(plain(input_ids=tokens).logits[0, sequence.prompt_length - 1 : -1].float().cpu())
    del plain
    if device != "cpu":
        torch.cuda.empty_cache()  # an engine takes the card's memory next
    return found


def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1)


def _shifted(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.amax(-1, keepdim=True)


def _float_rows(stream: RowStream, step: int) -> np.ndarray:
    """Return [R, C] float32. A stream of bfloat16 yields the bits of its numbers."""
    rows = np.concatenate([rows for _, _, rows in stream_rows(stream, step)])
    return (rows.astype(np.uint32) << 16).view(np.float32) if stream.dtype == "bfloat16" else rows.astype(np.float32)


def measure_error(engine: Engine, reference: Path, vocab: int = VOCAB) -> dict[str, float]:
    """Largest |difference| of a logprob (of the logits and hidden signals: of a shifted logit) from plain HF."""
    batch = sequences(3, 20, 30, vocab)
    expected = np.load(reference)  # logprobs [R, V] of each sequence
    worst = dict.fromkeys(SIGNALS, 0.0)
    head = _float_rows(engine.lm_head("fp32"), 4096)
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
                rows = _float_rows(scored, 16)
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
