"""Error of a teacher's engine: its logprobs next to those of plain, unbatched transformers in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from teacher_server.engines.base import Engine, ScoreParams, TokenSequence
from teacher_server.wire.table import TopKTable

_PARAMS = ScoreParams("topk", k=64, wire="fp32")


def _sequences(vocab: int) -> list[TokenSequence]:
    rng = np.random.default_rng(0)
    return [TokenSequence(rng.integers(0, vocab, 50).astype(np.int32), 20) for _ in range(3)]


def save_reference(model: str, file: Path, *, device: str, vocab: int) -> float:
    """Save float32 logprobs [R, V] of plain transformers; return their largest error in the engines' dtype.

    On the CPU the engines compute in float32, too: 0.
    """
    exact = _plain_logprobs(model, torch.float32, device, vocab)
    np.savez(file, *(logprobs.numpy() for logprobs in exact))
    if device == "cpu":
        return 0.0
    rounded = _plain_logprobs(model, torch.bfloat16, device, vocab)
    return max(float((a - b).abs().max()) for a, b in zip(rounded, exact, strict=True))


def error_limit(device: str, plain_error: float) -> float:
    """Return the limit of an engine's error. In bfloat16 rounding depends on depth and width of the model."""
    return 1e-3 if device == "cpu" else 2.0 * plain_error


def _plain_logprobs(model: str, dtype: torch.dtype, device: str, vocab: int) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().to(device)
    found = []
    with torch.inference_mode():
        for sequence in _sequences(vocab):
            tokens = torch.from_numpy(sequence.token_ids.astype(np.int64))[None].to(device)
            logits = plain(input_ids=tokens).logits[0, sequence.prompt_length - 1 : -1]
            found.append(logits.float().cpu().log_softmax(-1))
    del plain
    if device != "cpu":
        torch.cuda.empty_cache()  # an engine takes the card's memory next
    return found


def measure_error(engine: Engine, reference: Path, vocab: int) -> float:
    """Return the largest difference of a listed logprob, nats."""
    expected = np.load(reference)
    worst = 0.0
    for i, scored in enumerate(engine.score(_sequences(vocab), _PARAMS)):
        assert isinstance(scored, TopKTable)
        wanted = np.take_along_axis(expected[f"arr_{i}"], scored.ids.astype(np.int64), 1)
        worst = max(worst, float(np.abs(scored.logprobs - wanted).max()))
    return worst
