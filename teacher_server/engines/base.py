"""Interface between a worker and its engine: score a batch, and stream matrices that are too large for one message.

The worker owns sockets, batching and retries; an engine owns only a model.
Letters: P prompt tokens, R response tokens, M of them have rows, K top-k entries, G given ids, V rows of the LM head,
H hidden size, C columns.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from teacher_server.vision.images import EncodedImage, ImageError
from teacher_server.wire.payload import given_problem
from teacher_server.wire.protocol import RowDtype, Signal, Wire
from teacher_server.wire.table import TopKTable

if TYPE_CHECKING:
    from teacher_server.vision.processor import ImageProcessor

ENGINE_PID = "TEACHER_ENGINE_PID"  # environment variable: the process whose children are vLLM's workers


@dataclass(frozen=True, slots=True)
class UnitMap:
    """The unit of each token, of a client that asks for sums over units. Equal digests are equal maps."""

    digest: bytes
    units: np.ndarray = field(compare=False)  # [V'] int32, below ScoreParams.n_vocab; V' <= V, others are left out


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """Parameters common to a batch. `teacher_server.wire.protocol.ScoreRequest` describes the fields."""

    signal: Signal
    k: int = 0
    mass: float = 0.0
    temperature: float = 1.0
    n_vocab: int = 0  # keep the logits of ids below this before normalization; 0 = all of them
    wire: Wire = "fp32"  # dtype of the rows of a stream
    n_given: int = 0
    with_sampled: bool = False
    units: UnitMap | None = None  # topk: `n_vocab` units are listed in place of tokens


@dataclass(frozen=True, slots=True)
class TokenSequence:
    token_ids: np.ndarray  # [P + R] int32
    prompt_length: int  # P >= 1
    given: np.ndarray | None = None  # [M, G] int32, ids that the top-k of each row contains; G = ScoreParams.n_given
    own: np.ndarray | None = None  # [R] bool, the response tokens that have rows, at least one; None means all
    images: tuple[EncodedImage, ...] = ()  # in the order of their tokens

    @property
    def n_response(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def response(self) -> np.ndarray:
        """Return [R] int32."""
        return self.token_ids[self.prompt_length :]

    @property
    def n_rows(self) -> int:
        """Return M."""
        return self.n_response if self.own is None else int(np.count_nonzero(self.own))

    @property
    def rows(self) -> np.ndarray:
        """Return [M] int64, the positions in the response of the tokens that have rows."""
        return np.arange(self.n_response) if self.own is None else np.flatnonzero(self.own)

    @property
    def own_ids(self) -> np.ndarray:
        """Return [M] int32, the response tokens that have rows."""
        return self.response if self.own is None else self.response[self.own]


class RowStream(Protocol):
    """A matrix that is computed in chunks of rows while the client reads it. Holds at most [M, H] hidden states."""

    n_rows: int
    n_cols: int
    dtype: RowDtype  # depends on the requested wire: with fp16 two bytes a number, else the engine's precision

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Return [stop - start, C], contiguous, of `payload.WIRE_DTYPES[dtype]`. Call in ascending order, rows once.

        Raises:
            ArithmeticError: on a NaN or an infinity.
        """
        ...

    def close(self) -> None:
        """Release the memory. Can be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class Writing:
    """How to write answers: `teacher_server.wire.protocol.GenerateRequest` describes the fields."""

    n: int
    temperature: float
    top_p: float
    max_tokens: int
    n_vocab: int
    stop_ids: tuple[int, ...]


# topk: TopKTable; sampled: [M] float32; logits and hidden: a RowStream.
Scores = TopKTable | np.ndarray | RowStream


class Engine(Protocol):
    """A loaded model. Call it from one thread.

    One that computes a common prompt once for the sequences of a batch also has the attribute `prefix_block`, an int,
    and one that pads no sequence `pads = False`; see the functions of these names. One that computes
    `ScoreParams.units` has `sums_units = True`. One that writes answers has the method `generate` of `Writer`.
    """

    name: str  # "hf", "vllm", or a name of your own
    device: str
    dtype: str  # dtype of the weights, torch's name without "torch."
    vocab_size: int  # rows of the LM head
    hidden_size: int
    max_tokens: int  # longest P + R
    has_plain_head: bool  # logits = hidden @ head.T, without bias, scale or cap; required for `hidden` and `lm_head`

    def score(self, batch: Sequence[TokenSequence], params: ScoreParams) -> list[Scores]:
        """Return the scores of a batch, in order. Blocks for a forward pass.

        Row j is the distribution that predicts the response token i = `TokenSequence.rows`[j] (the logits at position
        P - 1 + i). The model reads all tokens.

        Raises:
            ArithmeticError: if the model's output contains a NaN or an infinity.
        """
        ...

    def lm_head(self, wire: Wire) -> RowStream:
        """Return the [V, H] matrix that maps hidden states to logits. Requires `has_plain_head`."""
        ...


@runtime_checkable
class Writer(Protocol):
    """An engine that writes answers."""

    def generate(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], writing: Writing
    ) -> Generator[list[np.ndarray] | None]:
        """Yield None after each step, and at the end all answers: `n` of one prompt after the other.

        An answer has [R] int32 ids, R <= `max_tokens`. It ends with its first stop id, if it has one. Equal seeds give
        equal answers. Closing the generator stops the generation.

        Args:
            prompts: [P] int32 each.
            seeds: of each prompt; answer i has the seed + i.
        """
        ...


def prefix_block(engine: Engine) -> int:
    """Return the engine's `prefix_block`, 0 without one: how an engine computes sequences that share a prompt.

    With b > 0 it computes a prompt of more than b tokens once for all sequences of a batch. Each further sequence
    costs at most b tokens of the prompt and those of its response. With 0 it computes each sequence as a whole.
    """
    return getattr(engine, "prefix_block", 0)


def pads(engine: Engine) -> bool:
    """Return whether the engine computes each sequence of a batch as if it were as long as the longest one."""
    return getattr(engine, "pads", True)


def stream_rows(stream: RowStream, step: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (start, stop, rows) with at most `step` rows each, and close the stream at the end."""
    try:
        for start in range(0, stream.n_rows, step):
            stop = min(start + step, stream.n_rows)
            yield start, stop, stream.rows(start, stop)
    finally:
        stream.close()


def image_processor(engine: object) -> ImageProcessor | None:
    """Return the engine's `image_processor`; None if it takes no images."""
    return getattr(engine, "image_processor", None)


class Limits(Protocol):
    """Limits of a model that `request_problem` checks; see `Engine`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def has_plain_head(self) -> bool: ...


def sums_units(engine: object) -> bool:
    """Return whether the engine lists sums over units; one of your own would list tokens without knowing it."""
    return getattr(engine, "sums_units", False)


def request_problem(engine: Limits, sequence: TokenSequence, params: ScoreParams) -> str | None:
    """Return why this engine cannot process a request, or None. Call it before building the batch."""
    if len(sequence.token_ids) > engine.max_tokens:
        return f"{len(sequence.token_ids)} tokens are more than this model's {engine.max_tokens}"
    if int(sequence.token_ids.max()) >= engine.vocab_size:
        return f"token id {int(sequence.token_ids.max())} is not below this model's vocab_size {engine.vocab_size}"
    processor = image_processor(engine)
    if sequence.images and processor is None:
        return "it has images, and this teacher takes none. Fix: start it with --images"
    if processor is not None:
        try:
            processor.check(sequence.token_ids, sequence.images)
        except ImageError as error:
            return str(error)
    n_vocab = params.n_vocab or engine.vocab_size  # the ids in the reply are below it
    n_ids = n_vocab  # the response tokens are below it
    if params.units is not None:
        n_ids = len(params.units.units)
        if not sums_units(engine):
            return "this engine cannot sum probabilities over units. Fix: use signal topk, or engine hf or vllm"
        if n_ids > engine.vocab_size:
            return f"the map of units has {n_ids} tokens, more than this model's vocabulary of {engine.vocab_size}"
    elif params.n_vocab > engine.vocab_size:
        return f"n_vocab = {params.n_vocab} is more than this model's vocabulary of {engine.vocab_size}"
    if params.k > n_vocab:
        return f"k = {params.k} is more than the vocabulary of {n_vocab}"
    needs_response = params.signal == "sampled" or params.with_sampled
    if needs_response and int(sequence.own_ids.max()) >= n_ids:
        return f"a response token is not below n_vocab = {n_ids}, so its logprob is undefined"
    if sequence.given is not None and (problem := given_problem(sequence.given, sequence.n_rows, n_vocab)):
        return problem
    if params.signal == "hidden" and not engine.has_plain_head:
        return "signal hidden is not supported: the LM head of this model is more than a matrix. Fix: use topk"
    return None
