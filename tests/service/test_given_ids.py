"""Requests with ids that cannot be given, at a real server. Lists with given ids: test_endpoint_signals.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import zmq

from gkd.errors import TeacherError
from gkd.types import Rollout
from teacher_server.wire.payload import pack_given
from teacher_server.wire.protocol import ErrorReply, as_frame, checksum, replies, requests
from tests.service.conftest import TRIVIAL_VOCAB
from tests.service.harness import ServerProcess, connect, random_rollouts, submit, with_ids
from tests.service.messages import make_request
from tests.service.scripted import N_VOCAB as SCRIPTED_VOCAB
from tests.service.scripted import ScriptedServer, always_valid, client

pytestmark = pytest.mark.service
N_VOCAB, K = TRIVIAL_VOCAB, 8


def rollouts_with_ids(n: int, n_given: int, n_vocab: int = N_VOCAB) -> list[Rollout]:
    return [with_ids(rollout, n_given, n_vocab) for rollout in random_rollouts(n, n_vocab)]


def raw(port: int, frames: list[bytes]) -> list[bytes]:
    """Send raw frames and return the reply's."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart(frames)
        assert socket.poll(10_000), "no reply"
        return socket.recv_multipart()


def bad(rollout: Rollout, name: str) -> Rollout:
    ids = rollout.top_ids.copy()
    if name == "outside":
        ids[-1, 0] = N_VOCAB
    elif name == "negative":
        ids[0, 0] = -1
    elif name == "twice":
        ids[0, 1] = ids[0, 0]
    elif name == "rows":
        ids = np.concatenate([ids, ids[:1]])
    else:
        ids = np.tile(np.arange(K + 1, dtype=np.int32), (len(ids), 1))
    return replace(rollout, top_ids=ids)


BAD = ["outside", "negative", "twice", "rows", "many"]


@pytest.mark.parametrize("name", BAD)
def test_the_client_refuses_bad_ids(name: str) -> None:
    """Fails if bad ids are sent, or the error does not name the sequence."""
    rollout = bad(rollouts_with_ids(1, 4)[0], name)
    with connect(1, k=K, n_vocab=N_VOCAB) as teacher, pytest.raises(TeacherError, match="prompt 0, sample 0"):
        submit(teacher, rollout)


@pytest.mark.parametrize("name", BAD)
def test_the_server_refuses_bad_ids(trivial_server: ServerProcess, name: str) -> None:
    """Fails if a faulty client can make the engine fail, or gets scores for other ids than it gave."""
    rollout = bad(rollouts_with_ids(1, 4)[0], name)
    tokens = np.concatenate([rollout.prompt_ids, rollout.response_ids])
    if name == "negative":  # three bytes hold no sign
        rollout.top_ids[0, 0] = (1 << 24) - 1
    frames = pack_given(rollout.top_ids)
    request = make_request(tokens, prompt_length=len(rollout.prompt_ids), k=K, n_given=min(rollout.top_ids.shape[1], K))
    request.given_checksums = [checksum(frame) for frame in frames]
    header = requests.encode(request)
    reply = replies.decode(raw(trivial_server.port, [header, *(bytes(f) for f in (as_frame(tokens), *frames))])[0])
    assert isinstance(reply, ErrorReply)
    assert reply.code == ("damaged" if name in ("rows", "many") else "bad_request")


def test_a_reply_without_the_given_ids_is_an_error() -> None:
    """Fails if a server that ignores the ids gives a list that the loss takes for the union."""
    (rollout,) = rollouts_with_ids(1, 4, SCRIPTED_VOCAB)
    with (
        ScriptedServer(always_valid) as scripted,
        client(scripted) as teacher,
        pytest.raises(TeacherError, match=r"prompt 0.*'w0'.*given id"),
    ):
        submit(teacher, rollout).result(timeout=30)
