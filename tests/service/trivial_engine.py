"""Engine without a model, for load and chaos tests: scores are a function of the tokens, computed by numpy.

`--engine tests.service.trivial_engine:load` starts it, as any engine that the teacher server does not have itself.

A test recomputes the expected scores, so it detects a reply for other tokens, an additional row or swapped
frames. Each row depends on every token before it, through a running sum of hashes.

Letters: P prompt tokens, R response tokens, K top-k entries, G given ids, V vocabulary, C columns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import numpy as np

from teacher_server.engines.base import RowStream, ScoreParams, Scores, TokenSequence, Writing
from teacher_server.engines.load import EngineSettings
from teacher_server.wire.protocol import RowDtype, Wire
from teacher_server.wire.table import NO_ID, TopKTable

HIDDEN_SIZE = 8
STEP_S = 0.005  # of an answer
_RATIO = 0.75  # ratio of the probabilities of two consecutive entries
_MIX = np.uint64(0x9E3779B97F4A7C15)
_POSITION_HASHES = np.arange(1 << 20, dtype=np.uint64) * _MIX  # one for each position of the longest sequence


def _row_hashes(token_ids: np.ndarray, prompt_length: int) -> np.ndarray:
    """Return [R] uint64. Row j depends on tokens 0 .. P - 1 + j and on their order."""
    mixed = (token_ids.astype(np.uint64) + _POSITION_HASHES[: len(token_ids)]) * _MIX
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MIX
    running = np.cumsum(mixed, dtype=np.uint64)[prompt_length - 1 : -1]  # modulo 2^64
    return running ^ (running >> np.uint64(32))


def _tail(hashes: np.ndarray) -> np.ndarray:
    """Return [R] float32 in [1/16, 1/2): the probability outside of the top-k."""
    return (0.0625 + (hashes & np.uint64(0xFFFF)).astype(np.float32) * (0.4375 / 65536)).astype(np.float32)


def trivial_topk(
    token_ids: np.ndarray,
    prompt_length: int,
    k: int,
    vocab_size: int,
    mass: float = 0.0,
    given: np.ndarray | None = None,
) -> TopKTable:
    """Return the top-k scores of `TrivialEngine`.

    Args:
        token_ids: [P + R] int32.
        k: number of entries, at most `vocab_size`; their ids are consecutive, modulo `vocab_size`.
        mass: as in ScoreRequest.
        given: [R, G] ids that each row lists; the others follow the first id, as without.
    """
    hashes = _row_hashes(token_ids, prompt_length)
    base = ((hashes >> np.uint64(16)) % np.uint64(vocab_size)).astype(np.int32)  # [R]
    steps = np.arange(k, dtype=np.int32) if given is None else _steps_with((given - base[:, None]) % vocab_size, k)
    ids = base[:, None] + steps
    ids -= np.where(ids >= vocab_size, np.int32(vocab_size), np.int32(0))
    tail = _tail(hashes)
    falling = np.arange(k) * np.log(_RATIO)
    shares = (falling - np.log(np.exp(falling).sum())).astype(np.float32)  # [K], logs of numbers with sum 1
    logprobs = np.log1p(-tail)[:, None] + shares
    if mass == 0:
        return TopKTable(ids, logprobs, tail)
    cumulative = np.exp(logprobs).cumsum(-1)  # [R, K]
    counts = np.minimum((cumulative < mass).sum(-1) + 1, k).astype(np.int32)
    dropped = np.arange(k) >= counts[:, None]
    tail = (1 - np.take_along_axis(cumulative, counts[:, None] - 1, 1)[:, 0]).astype(np.float32)
    ids[dropped], logprobs[dropped] = NO_ID, -np.inf
    return TopKTable(ids, logprobs, tail, counts)


def _steps_with(given: np.ndarray, k: int) -> np.ndarray:
    """Return [R, K] ascending distances from a row's first id: the given ones [R, G] and the smallest others."""
    free = np.ones((len(given), k + given.shape[1]), bool)
    rows, columns = np.nonzero(given < free.shape[1])
    free[rows, given[rows, columns]] = False
    others = np.argsort(~free, axis=1, kind="stable")[:, : k - given.shape[1]]
    return np.sort(np.concatenate([given, others], axis=1), axis=1).astype(np.int32)


def trivial_sampled(token_ids: np.ndarray, prompt_length: int) -> np.ndarray:
    """Return [R] float32 in (-8, 0]."""
    hashes = _row_hashes(token_ids, prompt_length)
    own = token_ids[prompt_length:].astype(np.uint64) * _MIX
    return ((hashes ^ own) >> np.uint64(40)).astype(np.float32) * np.float32(-8 / (1 << 24))


def trivial_logits(token_ids: np.ndarray, prompt_length: int, n_vocab: int) -> np.ndarray:
    """Return [R, n_vocab] float32 integers in [-255, 0]."""
    base = (_row_hashes(token_ids, prompt_length) >> np.uint64(16)) % np.uint64(n_vocab)
    columns = np.arange(n_vocab, dtype=np.int64)
    return -(((columns - base[:, None].astype(np.int64)) % n_vocab) % 256).astype(np.float32)


def trivial_hidden(token_ids: np.ndarray, prompt_length: int) -> np.ndarray:
    """Return [R, HIDDEN_SIZE] float32 integers in [0, 255]."""
    hashes = _row_hashes(token_ids, prompt_length)
    return np.ascontiguousarray(hashes).view(np.uint8).reshape(-1, HIDDEN_SIZE).astype(np.float32)


def trivial_head(vocab_size: int) -> np.ndarray:
    """Return [V, HIDDEN_SIZE] float32 integers in [0, 255]."""
    return (np.arange(vocab_size * HIDDEN_SIZE) % 256).astype(np.float32).reshape(vocab_size, HIDDEN_SIZE)


def trivial_answer(prompt: np.ndarray, seed: int, writing: Writing) -> np.ndarray:
    """Return the answer that `TrivialEngine` writes, [R] int32: a function of prompt and seed."""
    rng = np.random.default_rng([seed, *prompt.tolist()])
    ids = rng.integers(0, writing.n_vocab, writing.max_tokens).astype(np.int32)
    ends = np.flatnonzero(np.isin(ids, writing.stop_ids))
    return ids[: int(ends[0]) + 1] if len(ends) else ids


def _spread(given: np.ndarray, sequence: TokenSequence) -> np.ndarray:
    """Return [R, G] with the given ids at the rows that they are for, and any at the others."""
    spread = np.repeat(given[:1], sequence.n_response, axis=0)
    spread[sequence.rows] = given
    return spread


class _ArrayStream:
    """A `RowStream` of rows that a function computes. They are integers up to 255, so float16 is exact."""

    def __init__(self, make: Callable[[int, int], np.ndarray], n_rows: int, n_cols: int, wire: Wire) -> None:
        self.n_rows, self.n_cols = n_rows, n_cols
        self.dtype: RowDtype = "float16" if wire == "fp16" else "float32"
        self._make = make

    def rows(self, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(self._make(start, stop), dtype=np.dtype(self.dtype))

    def close(self) -> None:
        """Do nothing: the stream holds no memory."""


class TrivialEngine:
    """`Engine` without a model. The temperature has no effect.

    Args:
        vocab_size: vocabulary that it announces.
        max_tokens: longest P + R that it accepts.
    """

    name = "trivial"
    device = "cpu"
    dtype = "float32"
    has_plain_head = True
    hidden_size = HIDDEN_SIZE

    def __init__(self, *, vocab_size: int, max_tokens: int) -> None:
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens

    def score(self, batch: Sequence[TokenSequence], params: ScoreParams) -> list[Scores]:
        """See `Engine.score`."""
        return [self._score(sequence, params) for sequence in batch]

    def _score(self, sequence: TokenSequence, params: ScoreParams) -> Scores:
        token_ids, prompt_length, rows = sequence.token_ids, sequence.prompt_length, sequence.rows
        n_vocab = params.n_vocab or self.vocab_size
        if params.signal == "topk":
            given = None if sequence.given is None else _spread(sequence.given, sequence)
            scores = trivial_topk(token_ids, prompt_length, params.k, n_vocab, params.mass, given)
            counts = None if scores.counts is None else scores.counts[rows]
            sampled = trivial_sampled(token_ids, prompt_length)[rows] if params.with_sampled else None
            return TopKTable(scores.ids[rows], scores.logprobs[rows], scores.tail[rows], counts, sampled)
        if params.signal == "sampled":
            return trivial_sampled(token_ids, prompt_length)[rows]
        if params.signal == "hidden":
            hidden = trivial_hidden(token_ids, prompt_length)[rows]
            return _ArrayStream(lambda start, stop: hidden[start:stop], len(rows), HIDDEN_SIZE, params.wire)

        def logits(start: int, stop: int) -> np.ndarray:
            first, last = int(rows[start]), int(rows[stop - 1])
            whole = trivial_logits(token_ids[: prompt_length + last + 1], prompt_length + first, n_vocab)
            return whole[rows[start:stop] - first]

        return _ArrayStream(logits, len(rows), n_vocab, params.wire)

    def generate(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], writing: Writing
    ) -> Generator[list[np.ndarray] | None]:
        """See `Writer.generate`. A step takes `STEP_S`, and each answer gets one token in it."""
        for _ in range(writing.max_tokens):
            time.sleep(STEP_S)
            yield None
        yield [
            trivial_answer(prompt, seed + i, writing)
            for prompt, seed in zip(prompts, seeds, strict=True)
            for i in range(writing.n)
        ]

    def lm_head(self, wire: Wire) -> RowStream:
        """See `Engine.lm_head`."""
        head = trivial_head(self.vocab_size)
        return _ArrayStream(lambda start, stop: head[start:stop], self.vocab_size, HIDDEN_SIZE, wire)


def load(settings: EngineSettings) -> TrivialEngine:
    """Return the engine with the vocabulary of the model folder's config.json; it needs no weights."""
    config = json.loads((Path(settings.model) / "config.json").read_text())
    return TrivialEngine(vocab_size=config["vocab_size"], max_tokens=settings.max_tokens)
