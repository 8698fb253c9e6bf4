"""What a worker needs of an engine: the final hidden states of a batch, and what can be read off them.

The worker owns sockets, batching and retries; an engine owns a model and knows nothing of them.
Letters: P prompt tokens, R response tokens, K top-k entries, V rows of the LM head, H hidden size, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from teacher_server.wire.payload import TopKScores
from teacher_server.wire.protocol import RowDtype, Signal, Wire

ENGINE_PID = "TEACHER_ENGINE_PID"  # environment variable: the process whose children are vLLM's workers


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """What a batch has in common; see `teacher_server.wire.protocol.ScoreRequest` for the fields."""

    signal: Signal
    k: int = 0
    mass: float = 0.0
    temperature: float = 1.0
    n_vocab: int = 0  # cut logits to the ids below this before normalising; 0 = all of them
    wire: Wire = "fp32"  # dtype of the rows of a stream


@dataclass(frozen=True, slots=True)
class TokenSequence:
    token_ids: np.ndarray  # [P + R] int32
    prompt_length: int  # P >= 1

    @property
    def n_response(self) -> int:
        return len(self.token_ids) - self.prompt_length


class RowStream(Protocol):
    """A matrix that is made piece by piece, while the client takes it. Holds [R, H] hidden states at most."""

    n_rows: int
    n_cols: int
    dtype: RowDtype  # what the wire asks for: with fp16 two bytes a number, else as the engine computed

    def rows(self, start: int, stop: int) -> np.ndarray:
        """[stop - start, C], contiguous, of `payload.WIRE_DTYPES[dtype]`. Called in ascending order, each row once.

        Raises:
            ArithmeticError: a NaN or an infinity.
        """
        ...

    def close(self) -> None:
        """Let go of what it holds; may be called twice."""
        ...


# Of `topk`: TopKScores. Of `sampled`: [R] float32. Of `logits` and `hidden`: a RowStream.
Scores = TopKScores | np.ndarray | RowStream


class Engine(Protocol):
    """A loaded model. One thread calls it."""

    name: str  # "hf", "vllm", "trivial"
    device: str
    dtype: str  # of the weights, as torch says it without "torch."
    vocab_size: int  # rows of the LM head
    hidden_size: int
    max_tokens: int  # longest P + R
    has_plain_head: bool  # logits = hidden @ head.T: without a bias, scale or cap. If not, no `hidden` and no LM head

    def score(self, batch: Sequence[TokenSequence], params: ScoreParams) -> list[Scores]:
        """Score a batch, in order; blocks for a forward pass.

        Row j is the distribution that predicts response token j (the logits at position P - 1 + j).

        Raises:
            ArithmeticError: the model put out a NaN or an infinity.
        """
        ...

    def lm_head(self, wire: Wire) -> RowStream:
        """[V, H] matrix that makes logits of hidden states; only if `has_plain_head`."""
        ...


def stream_rows(stream: RowStream, step: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """(start, stop, rows) pieces of at most `step` rows; closes the stream at the end."""
    try:
        for start in range(0, stream.n_rows, step):
            stop = min(start + step, stream.n_rows)
            yield start, stop, stream.rows(start, stop)
    finally:
        stream.close()


class Limits(Protocol):
    """What `request_problem` has to know of a model; see `Engine`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def has_plain_head(self) -> bool: ...


def request_problem(engine: Limits, sequence: TokenSequence, params: ScoreParams) -> str | None:
    """Why this engine cannot answer this request, or None; checked before the batch is built."""
    if len(sequence.token_ids) > engine.max_tokens:
        return f"{len(sequence.token_ids)} tokens are more than this model's {engine.max_tokens}"
    if int(sequence.token_ids.max()) >= engine.vocab_size:
        return f"token id {int(sequence.token_ids.max())} is past this model's vocabulary of {engine.vocab_size}"
    if params.n_vocab > engine.vocab_size:
        return f"n_vocab = {params.n_vocab} is more than this model's vocabulary of {engine.vocab_size}"
    if params.k > (params.n_vocab or engine.vocab_size):
        return f"k = {params.k} is more than the vocabulary of {params.n_vocab or engine.vocab_size}"
    if params.signal == "sampled" and int(sequence.token_ids[sequence.prompt_length :].max()) >= (
        params.n_vocab or engine.vocab_size
    ):
        return f"a response token is past n_vocab = {params.n_vocab}, so its logprob is not defined"
    if params.signal == "hidden" and not engine.has_plain_head:
        return "this model's LM head is more than a matrix, so its hidden states do not give its logits; ask for topk"
    return None
