"""What a worker needs of an engine: top-k logprobs of a batch of sequences.

The worker owns sockets, batching and retries; an engine owns a model and knows nothing of them.
Letters: P prompt tokens, R response tokens, K top-k entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """What a batch has in common."""

    k: int
    temperature: float
    n_vocab: int  # cut logits to the ids below this before normalising; 0 = all of them


@dataclass(frozen=True, slots=True)
class TokenSequence:
    token_ids: np.ndarray  # [P + R] int32
    prompt_length: int  # P >= 1

    @property
    def n_response(self) -> int:
        return len(self.token_ids) - self.prompt_length


@dataclass(frozen=True, slots=True)
class TopK:
    """Row j is the distribution that predicts response token j (the logits at position P - 1 + j)."""

    ids: np.ndarray  # [R, K] int32
    logprobs: np.ndarray  # [R, K] float32, nats, descending, normalised before the cut to K


class Engine(Protocol):
    """A loaded model. One thread calls it."""

    name: str  # "hf", "vllm"
    device: str
    vocab_size: int  # rows of the LM head
    max_tokens: int  # longest P + R

    def score_topk(self, batch: Sequence[TokenSequence], params: ScoreParams) -> list[TopK]:
        """Score a batch, in order; blocks for a forward pass.

        Raises:
            ArithmeticError: the model put out a NaN or an infinity.
        """
        ...


def request_problem(engine: Engine, sequence: TokenSequence, params: ScoreParams) -> str | None:
    """Why this engine cannot answer this request, or None; checked before the batch is built."""
    if len(sequence.token_ids) > engine.max_tokens:
        return f"{len(sequence.token_ids)} tokens are more than this model's {engine.max_tokens}"
    if int(sequence.token_ids.max()) >= engine.vocab_size:
        return f"token id {int(sequence.token_ids.max())} is past this model's vocabulary of {engine.vocab_size}"
    if params.n_vocab > engine.vocab_size:
        return f"n_vocab = {params.n_vocab} is more than this model's vocabulary of {engine.vocab_size}"
    if params.k > (params.n_vocab or engine.vocab_size):
        return f"k = {params.k} is more than the vocabulary of {params.n_vocab or engine.vocab_size}"
    return None
