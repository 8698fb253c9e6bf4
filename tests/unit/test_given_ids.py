"""Ids that a client gives with a top-k request: on the wire, checked, and in the teacher's list."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from teacher_server.engines.base import ScoreParams, TokenSequence, request_problem
from teacher_server.engines.signals import score_hidden
from teacher_server.wire.payload import given_problem, listed_problem, pack_given, unpack_given
from teacher_server.wire.protocol import MAX_FRAME_BYTES, MAX_ID, ProtocolError, checksum, requests
from teacher_server.wire.table import TopKTable
from tests.service.messages import make_request, make_tokens
from tests.service.trivial_engine import TrivialEngine

N_VOCAB, N_ROWS = 90, 23


def distinct(n_rows: int, n: int, n_vocab: int = N_VOCAB, seed: int = 0) -> np.ndarray:
    """Return [n_rows, n] ids, distinct in each row."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(n_vocab)[:n] for _ in range(n_rows)]).astype(np.int32)


def sent(ids: np.ndarray, **changes: Any) -> tuple[Any, list[bytes]]:
    frames = [bytes(frame) for frame in pack_given(ids)]
    tokens = np.zeros(len(ids) + 1, np.int32)
    fields = {"k": ids.shape[1], "n_given": ids.shape[1], "given_checksums": [checksum(frame) for frame in frames]}
    return requests.decode(requests.encode(make_request(tokens, prompt_length=1, **(fields | changes)))), frames


@pytest.mark.parametrize("shape", [(1, 1), (30, 7), (100_000, 40)], ids=str)
def test_ids_survive_the_wire(shape: tuple[int, int]) -> None:
    """Fails if an id loses bits, a frame exceeds its limit, or ids move to another row."""
    ids = np.random.default_rng(0).integers(0, MAX_ID + 1, shape).astype(np.int32)
    request, frames = sent(ids)
    assert max(map(len, frames)) <= MAX_FRAME_BYTES and sum(map(len, frames)) == 3 * ids.size
    np.testing.assert_array_equal(unpack_given(request, frames), ids)


def test_frames_that_do_not_match_the_header_are_refused() -> None:
    """Fails if rows of another sequence, a missing frame or a flipped bit are used as ids."""
    request, frames = sent(distinct(12, 5))
    flipped = bytes([frames[0][0] ^ 1]) + frames[0][1:]
    for bad in ([], frames[:1], [*frames, b"x"], [flipped, frames[1]], sent(distinct(11, 5))[1]):
        with pytest.raises(ProtocolError):
            unpack_given(request, bad)
    without = make_request(make_tokens())
    assert unpack_given(without, []) is None
    with pytest.raises(ProtocolError):
        unpack_given(without, frames)


def changed(row: int, column: int, value: int) -> np.ndarray:
    ids = distinct(N_ROWS, 6)
    ids[row, column] = value
    return ids


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (changed(4, 2, -1), "-1 .* 4 "),
        (changed(5, 0, N_VOCAB), f"{N_VOCAB} .* 5 "),
        (changed(7, 3, int(distinct(N_ROWS, 6)[7, 0])), f"{distinct(N_ROWS, 6)[7, 0]} .* 7$"),
        (distinct(N_ROWS - 1, 6), f"{N_ROWS - 1}, 6"),
        (distinct(N_ROWS, 6)[:, :0], f"{N_ROWS}, 0"),
        (distinct(N_ROWS, 6)[0], r"\[6\]"),
        (distinct(N_ROWS, 6).astype(np.float32), "float32"),
    ],
    ids=["negative", "outside", "twice", "rows", "none", "flat", "dtype"],
)
def test_ids_that_cannot_be_given_have_a_problem(ids: np.ndarray, named: str) -> None:
    """Fails if an id out of range, given twice or in a wrong number of rows reaches a gather of the logits."""
    assert not given_problem(distinct(N_ROWS, 6), N_ROWS, N_VOCAB)
    problem = given_problem(ids, N_ROWS, N_VOCAB)
    with pytest.raises(ValueError, match=named):
        raise ValueError(problem)
    if ids.ndim == 2 and ids.size and ids.dtype == np.int32:
        sequence = TokenSequence(np.zeros(N_ROWS + 1, np.int32), 1, ids)
        engine = TrivialEngine(vocab_size=N_VOCAB, max_tokens=100)
        assert request_problem(engine, sequence, ScoreParams("topk", k=8, n_given=6)) == problem


def test_a_row_that_lacks_a_given_id_is_found() -> None:
    """Fails if a reply with the ids of another row passes as the scores of this one."""
    listed = distinct(N_ROWS, 12)
    given = np.take_along_axis(listed, distinct(N_ROWS, 5, 12, seed=1), axis=1)
    assert not listed_problem(given, listed)
    for row in (0, N_ROWS - 1):
        wrong = given.copy()
        wrong[row, 2] = next(i for i in range(N_VOCAB) if i not in listed[row])
        assert listed_problem(wrong, listed).split()[1] == str(row)
    assert listed_problem(given, np.roll(listed, 1, axis=0))


def scored(
    logits: torch.Tensor, params: ScoreParams, given: np.ndarray | None, tokens: np.ndarray | None = None
) -> TopKTable:
    """Run the engines' arithmetic on rows of logits, as two sequences."""
    tokens = np.zeros(len(logits), np.int32) if tokens is None else tokens
    parts = [slice(0, 9), slice(9, len(logits))]
    batch = [
        TokenSequence(np.append(0, tokens[part]).astype(np.int32), 1, None if given is None else given[part])
        for part in parts
    ]
    rows = torch.arange(float(len(logits)))[:, None]
    found: Any = score_hidden(rows, batch, lambda hidden: logits[hidden[:, 0].long()].clone(), params, logits.shape[1])
    return TopKTable.join(found)


def peaked_logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(N_ROWS, N_VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("n_vocab", [N_VOCAB, 70])
@pytest.mark.parametrize(("k", "n_given"), [(8, 8), (8, 3), (70, 20), (70, 70), (1, 1)])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_list_is_the_given_ids_and_the_most_probable_others(
    k: int, n_given: int, n_vocab: int, temperature: float
) -> None:
    """Fails if a given id is missing, repeated or scored wrongly, a more probable id is left out, or the tail is not
    the exact rest. With k = n_given no entry is the teacher's own choice, and the largest logit may be outside.
    """
    logits, given = peaked_logits(), distinct(N_ROWS, n_given, n_vocab)
    tokens = np.arange(N_ROWS, dtype=np.int32)
    params = ScoreParams("topk", k=k, temperature=temperature, n_vocab=n_vocab, n_given=n_given, with_sampled=True)
    got = scored(logits, params, given, tokens)
    exact = (logits[:, :n_vocab].double() / temperature).log_softmax(-1).numpy()
    for row in range(N_ROWS):
        others = [i for i in np.argsort(-exact[row]) if i not in given[row]][: k - n_given]
        assert sorted(got.ids[row]) == sorted([*given[row], *others])
    own = np.take_along_axis(exact, got.ids.astype(np.int64), 1)
    np.testing.assert_allclose(got.logprobs, own, atol=2e-5)
    assert (np.diff(got.logprobs, axis=1) <= 0).all()
    rest = exact.copy()
    np.put_along_axis(rest, got.ids.astype(np.int64), -np.inf, 1)
    np.testing.assert_allclose(got.tail, np.exp(rest).sum(-1), rtol=2e-5)
    np.testing.assert_allclose(got.sampled, exact[np.arange(N_ROWS), tokens], atol=2e-5)


def test_logits_far_above_the_given_ones_do_not_overflow() -> None:
    """Fails if the row's maximum is taken over the list, which need not contain the most probable id."""
    logits = torch.full((N_ROWS, N_VOCAB), -500.0)
    logits[:, 0] = 500.0
    got = scored(logits, ScoreParams("topk", k=2, n_given=2), np.tile(np.array([3, 4], np.int32), (N_ROWS, 1)))
    assert (got.logprobs == -1000.0).all() and (got.tail == 1.0).all()


@pytest.mark.parametrize("column", [3, 50])
def test_a_nan_beside_given_ids_is_an_error(column: int) -> None:
    """Fails if a NaN at a given id, or outside of the list, gives scores."""
    logits = peaked_logits()
    logits[7, column] = torch.nan
    with pytest.raises(ArithmeticError):
        scored(logits, ScoreParams("topk", k=2, n_given=2), np.tile(np.array([3, 4], np.int32), (N_ROWS, 1)))
