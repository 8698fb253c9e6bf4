"""Rows of the student's own tokens only, at a real server, and malformed masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from gkd.errors import TeacherError
from gkd.scoring.teacher.client import sequence_of
from gkd.types import Rollout, TeacherScores
from teacher_server.client.requests import RequestMessage, RequestSettings
from teacher_server.wire.payload import pack_given
from teacher_server.wire.protocol import (
    ErrorReply,
    ScoreRequest,
    Signal,
    as_frame,
    checksum,
    replies,
    requests,
    token_digest,
)
from tests.service.conftest import TRIVIAL_VOCAB
from tests.service.harness import ServerProcess, connect, own_turns, random_rollouts, with_ids
from tests.service.messages import make_request
from tests.service.scripted import N_VOCAB as SCRIPTED_VOCAB
from tests.service.scripted import ScriptedServer, client, valid_reply
from tests.service.test_given_ids import raw

pytestmark = pytest.mark.service
N_VOCAB, K, N_GIVEN = TRIVIAL_VOCAB, 8, 3
BOTH: tuple[Signal, ...] = ("topk", "sampled")
SIGNALS: dict[str, tuple[Signal, ...]] = {
    "topk": BOTH,
    "mass": BOTH,
    "given": BOTH,
    "sampled": ("sampled",),
    "logits": ("logits",),
    "hidden": ("hidden",),
}


def trajectories(n: int, seed: int = 1, **changes: Any) -> list[Rollout]:
    return [own_turns(rollout, seed) for rollout in random_rollouts(n, N_VOCAB, seed, **changes)]


def random_masks(n: int) -> list[Rollout]:
    """Return responses with masks of any form: single tokens, an observation first or last, nearly everything."""
    rng = np.random.default_rng(5)
    rollouts = random_rollouts(n, N_VOCAB, seed=7, response=(1, 12))
    masks = [rng.random(len(rollout.response_ids)) < rng.random() for rollout in rollouts]
    for mask in masks:
        mask[rng.integers(len(mask))] = True
    return [replace(rollout, own=mask) for rollout, mask in zip(rollouts, masks, strict=True)]


def tables_of(scores: TeacherScores) -> dict[str, np.ndarray]:
    """Return all arrays by name."""
    found = {name: getattr(scores, name) for name in ("sampled_logprobs", "logits", "hidden")}
    if scores.topk is not None:
        found |= {name: getattr(scores.topk, name) for name in ("ids", "logprobs", "tail", "counts")}
    return {name: array for name, array in found.items() if array is not None}


@pytest.mark.parametrize("wire", ["fp16", "fp32"])
@pytest.mark.parametrize("name", SIGNALS)
def test_rows_are_those_of_the_whole_response(trivial_server: ServerProcess, name: str, wire: str) -> None:
    """Fails if a row is of another token, an observation is not read by the teacher, or a mask changes another
    sequence of the request, whether it has a mask or not.
    """
    signals, mass = SIGNALS[name], 0.6 * (name == "mass")
    masked = [*trajectories(24), *random_masks(36), *random_rollouts(12, N_VOCAB, seed=9)]
    masked[3] = replace(masked[3], teacher_ids=np.arange(5, dtype=np.int32))
    whole = [replace(rollout, own=None) for rollout in masked]
    if name == "given":
        whole = [with_ids(rollout, N_GIVEN, N_VOCAB) for rollout in whole]
        ids = [rollout.top_ids for rollout in whole]
        masked = [replace(m, top_ids=i if m.own is None else i[m.own]) for m, i in zip(masked, ids, strict=True)]  # type: ignore[index]
    size = 1 if name in ("logits", "hidden") else 12
    with connect(trivial_server.port, n_in_flight=72, wire=wire, k=K) as teacher:
        asked = [teacher.submit(masked[at : at + size], signals, mass=mass) for at in range(0, 72, size)]
        full = [teacher.submit([rollout], signals, mass=mass) for rollout in whole]
        results = [scores for future in asked for scores in future.result(timeout=30)]
        references = [future.result(timeout=30)[0] for future in full]
    n_fewer = 0
    for rollout, result, reference in zip(masked, results, references, strict=True):
        got, expected = tables_of(result), tables_of(reference)
        assert got.keys() == expected.keys()
        for table in got:
            rows = expected[table] if rollout.own is None else expected[table][rollout.own]
            np.testing.assert_array_equal(got[table], rows, err_msg=table)
            n_fewer += len(expected[table]) - len(rows)
    assert n_fewer > 100


# Wire


def message(rollouts: list[Rollout], signal: Signal = "topk", **changes: Any) -> RequestMessage:
    settings = RequestSettings("", K, 1.0, 0, "fp16", 10.0)
    return settings.score(
        [sequence_of(rollout) for rollout in rollouts], signal, **({"k": K if signal == "topk" else 0} | changes)
    )


def test_the_tokens_carry_the_mask() -> None:
    """Fails if two masks of one sequence have the same digest, or ids are lost."""
    (rollout,) = trajectories(1, response=(20, 20))
    sent = message([rollout])
    tokens = np.frombuffer(sent.frames[0], "<i4")
    response = tokens[len(rollout.prompt_ids) :]
    np.testing.assert_array_equal(tokens[: len(rollout.prompt_ids)], rollout.prompt_ids)
    np.testing.assert_array_equal(response, np.where(rollout.own, rollout.response_ids, -1 - rollout.response_ids))
    assert sent.digest == token_digest(tokens) != message([replace(rollout, own=None)]).digest


def test_without_observations_nothing_new_is_sent() -> None:
    """Fails if a run without an environment sends a mask."""
    plain = random_rollouts(3, N_VOCAB)
    marked = [replace(rollout, own=np.ones(len(rollout.response_ids), bool)) for rollout in plain]
    for rollouts in (plain, marked):
        for some in (rollouts, rollouts[:1]):
            sent, expected = message(some), message([replace(rollout, own=None) for rollout in some])
            header = msgspec.structs.replace(sent.header, request_id=expected.header.request_id)
            assert requests.encode(header) == requests.encode(expected.header)
            assert b"n_own" not in requests.encode(header)
            assert [bytes(frame) for frame in sent.frames] == [bytes(frame) for frame in expected.frames]


def test_limits_count_rows() -> None:
    """Fails if the entries of tokens without rows count, or those of given ids are sent for them."""
    (rollout,) = random_rollouts(1, N_VOCAB, response=(600, 600))
    own = np.zeros(600, bool)
    own[-500:] = True
    long = replace(rollout, own=own)
    assert message([long], k=1 << 16).header.n_rows == 500
    with pytest.raises(TeacherError, match="600 rows"):
        message([rollout], k=1 << 16)
    given = message([replace(long, top_ids=with_ids(rollout, N_GIVEN, N_VOCAB).top_ids[own])])
    assert sum(memoryview(frame).nbytes for frame in given.frames[1:]) == 500 * N_GIVEN * 3


BAD_MASKS: dict[str, Callable[[int], np.ndarray]] = {
    "empty": lambda n: np.zeros(n, bool),
    "short": lambda n: np.ones(n - 1, bool),
    "numbers": lambda n: np.ones(n, np.int64),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_the_client_refuses_bad_masks(name: str) -> None:
    """Fails if a mask without own tokens, or of another shape, is sent, or the error does not name the sequence."""
    good, bad = random_rollouts(2, N_VOCAB, response=(5, 9))
    bad = replace(bad, own=BAD_MASKS[name](len(bad.response_ids)))
    with connect(1, k=K, n_vocab=N_VOCAB) as teacher:
        for rollouts, signals in (([good, bad], BOTH), ([bad], ("hidden",))):
            with pytest.raises(TeacherError, match=r"prompt 1, sample 0: own is .* at least one"):
                teacher.submit(rollouts, signals)


def test_a_negative_id_is_not_taken_for_a_mark() -> None:
    """Fails if an impossible id of the student is sent as one without a row."""
    (rollout,) = trajectories(1, response=(20, 20))
    rollout.response_ids[np.flatnonzero(rollout.own)[0]] = -4  # type: ignore[arg-type]
    with pytest.raises(TeacherError, match=r"prompt 0, sample 0: .*token ids -4"):
        message([rollout])


def test_a_reply_with_other_rows_is_damaged() -> None:
    """Fails if rows of the whole response are taken for those of the own tokens."""
    rollout = own_turns(random_rollouts(1, SCRIPTED_VOCAB, response=(20, 20))[0])

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Any]:
        every = valid_reply(request, np.where(tokens < 0, ~tokens, tokens), token_digest=token_digest(tokens))
        return [every if n < 2 else valid_reply(request, tokens)]

    with ScriptedServer(script) as scripted, client(scripted) as teacher:
        (scores,) = teacher.submit([rollout], ("topk",)).result(timeout=30)
        assert teacher.stats.n_damaged == 2
    np.testing.assert_array_equal(scores.topk.ids[:, 0], rollout.own_ids)


TOKENS = np.array([1, 2, 3, 4, ~5, ~6, 7, 8], np.int32)  # prompt of 3


def malformed() -> dict[str, tuple[np.ndarray, dict[str, Any]]]:
    """Return name -> (token frame, changes of the header)."""
    prompt, last = TOKENS.copy(), TOKENS.copy()
    prompt[1] = ~2
    last[-1] = np.iinfo(np.int32).min
    pair = {"lengths": [(1, 4), (2, 4)]}
    return {
        "a prompt token without a row": (prompt, {"n_own": 3}),
        "more rows than in the header": (TOKENS, {"n_own": 2}),
        "fewer rows than in the header": (TOKENS, {"n_own": 4}),
        "marks, but no number": (TOKENS, {}),
        "a number, but no marks": (np.abs(TOKENS), {"n_own": 3}),
        "an id that is no complement": (last, {"n_own": 2}),
        "a sequence without rows": (np.array([1, ~2, ~3, ~4, 5, 6, 7, 8], np.int32), {"n_own": 2} | pair),
        "marks in the second prompt": (np.array([1, 2, 3, 4, ~5, 6, 7, 8], np.int32), {"n_own": 4} | pair),
    }


@pytest.mark.parametrize("signal", ["topk", "sampled"])
@pytest.mark.parametrize("name", malformed())
def test_the_server_refuses_malformed_masks(trivial_server: ServerProcess, name: str, signal: str) -> None:
    """Fails if a faulty client gets rows of other tokens, or ends a worker."""
    tokens, changes = malformed()[name]
    request = make_request(tokens, prompt_length=3, signal=signal, **changes)
    reply = replies.decode(raw(trivial_server.port, [requests.encode(request), as_frame(tokens).tobytes()])[0])
    assert isinstance(reply, ErrorReply) and reply.code == "damaged", reply
    with connect(trivial_server.port) as teacher:
        assert teacher.submit(trajectories(1), BOTH).result(timeout=30)


def test_given_ids_of_all_tokens_do_not_fit_a_mask(trivial_server: ServerProcess) -> None:
    """Fails if ids of the whole response are read as those of the own tokens."""
    ids = np.tile(np.arange(2, dtype=np.int32), (5, 1))
    frames = pack_given(ids)
    request = make_request(TOKENS, prompt_length=3, n_own=3, n_given=2, given_checksums=list(map(checksum, frames)))
    header = requests.encode(request)
    reply = replies.decode(raw(trivial_server.port, [header, as_frame(TOKENS).tobytes(), *map(bytes, frames)])[0])
    assert isinstance(reply, ErrorReply) and reply.code == "damaged"
