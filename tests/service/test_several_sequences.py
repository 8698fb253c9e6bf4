"""Requests of several sequences at a real server."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gkd.errors import TeacherError, TeacherRefusal
from teacher_server.wire.protocol import ScoreReply, ScoreRequest, as_frame, checksum, replies
from tests.service.conftest import TRIVIAL_VOCAB
from tests.service.harness import ServerProcess, connect, own_turns, random_rollouts, submit, table_of
from tests.service.scripted import N_VOCAB as SCRIPTED_VOCAB
from tests.service.scripted import Message, ScriptedServer, client, valid_reply
from tests.service.trivial_engine import trivial_sampled

pytestmark = pytest.mark.service
N_VOCAB = TRIVIAL_VOCAB
BOTH = ("topk", "sampled")


@pytest.mark.parametrize(("wire", "mass"), [("fp16", 0.0), ("fp32", 0.6)])
def test_each_sequence_has_the_scores_of_a_request_of_its_own(
    trivial_server: ServerProcess, wire: str, mass: float
) -> None:
    """Fails if rows go to another sequence of the request, also where its sequences are in several batches."""
    rollouts = random_rollouts(60, N_VOCAB)
    with connect(trivial_server.port, n_in_flight=16, wire=wire) as teacher:
        single = [table_of(submit(teacher, rollout, mass=mass).result(timeout=30)) for rollout in rollouts]
        assert teacher.stats.n_sent == 60
        futures = [teacher.submit(rollouts[at : at + 12], BOTH, mass=mass) for at in range(0, 60, 12)]
        together = [scores for future in futures for scores in future.result(timeout=30)]
        assert teacher.stats.n_sent == 65
        larger = teacher.submit(rollouts, ("sampled",)).result(timeout=30)
        assert len(larger) == 60, "a request that is larger than the window is sent when the window is empty"
    for rollout, one, several, sampled in zip(rollouts, single, together, larger, strict=True):
        table, tokens = several.topk, np.concatenate([rollout.prompt_ids, rollout.response_ids])
        assert table is not None and sampled.topk is None
        for name in ("ids", "logprobs", "tail", "counts"):
            np.testing.assert_array_equal(getattr(table, name), getattr(one, name))
        for logprobs in (several.sampled_logprobs, sampled.sampled_logprobs):
            np.testing.assert_array_equal(logprobs, trivial_sampled(tokens, len(rollout.prompt_ids)))


def test_a_refusal_names_the_sequence(trivial_server: ServerProcess) -> None:
    """Fails if the user cannot find the sequence that the teacher refused, or the client is unusable afterwards."""
    rollouts = random_rollouts(5, N_VOCAB)
    bad = replace(rollouts[3], response_ids=np.array([1, N_VOCAB], np.int32))
    with connect(trivial_server.port) as teacher:
        with pytest.raises(TeacherRefusal) as refused:
            teacher.submit([*rollouts[:3], bad, rollouts[4]], ("topk",)).result(timeout=30)
        assert refused.value.code == "bad_request" and str(refused.value).startswith("prompt 3, sample 0:")
        assert len(teacher.submit(rollouts, ("topk",)).result(timeout=30)) == 5


def test_sequences_with_and_without_ids_are_not_mixed(trivial_server: ServerProcess) -> None:
    """Fails if the ids of one sequence would be read as those of the next one."""
    first, second = random_rollouts(2, N_VOCAB)
    with_ids = replace(first, top_ids=np.tile(np.arange(2, dtype=np.int32), (len(first.response_ids), 1)))
    with connect(trivial_server.port) as teacher, pytest.raises(TeacherError, match="prompt 1, sample 0"):
        teacher.submit([with_ids, second], ("topk",))


def test_invalid_scores_name_the_sequence() -> None:
    """Fails if an invalid row of the joined tables is not traced back to its sequence and its token."""
    rollouts = [own_turns(rollout) for rollout in random_rollouts(4, SCRIPTED_VOCAB, response=(20, 20))]
    row = sum(rollout.n_own for rollout in rollouts[:3]) - 1  # the last one of the third sequence
    position = np.flatnonzero(rollouts[2].own)[-1]
    assert position > rollouts[2].n_own

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        header, *frames = valid_reply(request, tokens)
        reply, tail = replies.decode(header), np.frombuffer(frames[2], "<f4").copy()
        tail[row] = 0.9
        frames[2] = as_frame(tail)
        assert isinstance(reply, ScoreReply)
        reply.checksums[2] = checksum(frames[2])
        return [[replies.encode(reply), *frames]]

    with ScriptedServer(script) as scripted, client(scripted, wire="fp32") as teacher:
        future = teacher.submit(rollouts, ("topk",))
        with pytest.raises(TeacherError, match=f"prompt 2, sample 0, .*position {position} "):
            future.result(timeout=30)
