"""A scripted teacher server: a real ROUTER in a thread that sends the replies of a test's script."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import zmq

from gkd.scoring.teacher.client import ZmqTeacher
from teacher_server.wire.keys import Authenticator, ServerKeys, secure_server
from teacher_server.wire.payload import unpack_tokens
from teacher_server.wire.protocol import (
    Buffer,
    ClientMessage,
    ErrorReply,
    InfoReply,
    InfoRequest,
    Ping,
    Pong,
    ScoreRequest,
    ServerMessage,
    replies,
    requests,
)
from teacher_server.wire.table import TopKTable
from tests.processes import wait_until
from tests.service.harness import connect, random_rollouts, score
from tests.service.messages import make_reply

N_VOCAB, N_HIDDEN, K = 50, 6, 8
Message = list[Buffer]
# (request, its tokens, its number since the start of the server) -> messages for the client
Script = Callable[[ScoreRequest, np.ndarray, int], list[Message]]


def one(header: ServerMessage) -> list[Message]:
    return [[replies.encode(header)]]


def error(request: ScoreRequest, code: Any, retry_after_s: float = 0.0) -> Message:
    header = ErrorReply(request_id=request.request_id, code=code, text="scripted", retry_after_s=retry_after_s)
    return one(header)[0]


def valid_reply(request: ScoreRequest, tokens: np.ndarray, **changes: Any) -> Message:
    """Return a valid `topk` reply whose top id at row j is the response token j, so that tests detect swapped replies.

    Probabilities are 1/2, 1/4, ...; with a mass target row j lists j % K + 1 of them.
    """
    lengths = np.array(request.lengths or [(request.prompt_length, len(tokens))])
    sequences = np.split(tokens, np.cumsum(lengths[:, 1])[:-1])
    response = np.concatenate([ids[n:] for n, ids in zip(lengths[:, 0], sequences, strict=True)])
    response = response[response >= 0]
    n_rows = len(response)
    ids = ((response[:, None] + np.arange(request.k)) % N_VOCAB).astype(np.int32)  # [R, K]
    logprobs = np.tile(np.log(0.5) * np.arange(1, request.k + 1, dtype=np.float32), (n_rows, 1))
    counts = (np.arange(n_rows) % request.k + 1).astype(np.int32) if request.mass else None
    last = np.full(n_rows, request.k) if counts is None else counts
    sampled = -response.astype(np.float32) if request.with_sampled else None
    scores = TopKTable(ids, logprobs, (0.5**last).astype(np.float32), counts, sampled)
    header, frames = make_reply(request, tokens, scores, **({"model_fingerprint": "model-a", "worker": "w0"} | changes))
    return [replies.encode(header), *frames]


def info_reply(request: InfoRequest) -> InfoReply:
    return InfoReply(
        request_id=request.request_id,
        teacher=request.teacher or "only",
        model_name="m",
        model_path="p",
        model_fingerprint="model-a",
        tokenizer_fingerprint="",
        vocab_size=N_VOCAB,
        hidden_size=N_HIDDEN,
        max_tokens=1024,
        n_workers=2,
        n_streams=24,
        engine="scripted",
        device="cpu",
        dtype="float32",
    )


class ScriptedServer:
    """Reply to pings and info requests, and to each ScoreRequest with the result of `script`.

    Received messages except pings are stored in `seen`. Everything runs in the server's thread; `do` runs a
    function there. `info` replaces fields of the description.
    """

    def __init__(
        self, script: Script, keys: ServerKeys | None = None, info: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.script, self._info = script, info
        self.seen: list[ClientMessage] = []
        self.identities: set[bytes] = set()
        self.epoch = os.urandom(16)
        self.replies_to_pings = True
        self._context = zmq.Context()
        self._keys = keys
        self.authenticator = None if keys is None else Authenticator(self._context, keys)
        if self.authenticator is not None:
            self.authenticator.start()
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._n_scores = 0
        self.port = 0
        self._bind()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _bind(self) -> None:
        self.router = self._context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.router.setsockopt(zmq.LINGER, 0)
        if self._keys is not None:
            secure_server(self.router, self._keys, "clients")
        if self.port:
            self.router.bind(f"tcp://127.0.0.1:{self.port}")
        else:
            self.port = self.router.bind_to_random_port("tcp://127.0.0.1")

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=30)
        if self.authenticator is not None:
            self.authenticator.stop()
        self._context.destroy(linger=0)

    def do(self, action: Callable[[], None]) -> None:
        """Run `action` in the server's thread, and wait for it."""
        done = threading.Event()
        self._actions.put(lambda: (action(), done.set())[0])
        assert done.wait(30)

    def reconnect(self, *, epoch: bytes = b"") -> None:
        """Close every connection, and accept new ones on the same port. With a new epoch it is a restart."""

        def rebind() -> None:
            self.router.close()
            self.epoch = epoch or self.epoch
            wait_until(self._try_bind, 30.0, "the port")

        self.do(rebind)

    def _try_bind(self) -> bool:
        try:
            self._bind()
        except zmq.ZMQError:  # the old socket releases the port asynchronously
            self.router.close()
            return False
        return True

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the received messages of one type."""
        return [message for message in list(self.seen) if isinstance(message, kind)]

    def _serve(self) -> None:
        while not self._ended.is_set():
            while not self._actions.empty():
                self._actions.get()()
            if self.router.poll(10):
                identity, head, *frames = self.router.recv_multipart()
                self.identities.add(identity)
                self._handle(identity, requests.decode(head), frames)
        self.router.close()

    def _handle(self, identity: bytes, request: ClientMessage, frames: list[bytes]) -> None:
        if isinstance(request, Ping):
            if self.replies_to_pings:
                self.send(identity, one(Pong(epoch=self.epoch, n_workers=1, n_queued=0)))
            return
        self.seen.append(request)
        if isinstance(request, InfoRequest):
            self.send(identity, one(msgspec.structs.replace(info_reply(request), **self._info)))
        elif isinstance(request, ScoreRequest):
            number, self._n_scores = self._n_scores, self._n_scores + 1
            self.send(identity, self.script(request, unpack_tokens(request, frames[:1]), number))

    def send(self, identity: bytes, messages: list[Message]) -> None:
        for message in messages:
            self.router.send_multipart([identity, *message])


# For tests of the client


def client(server: ScriptedServer, **options: Any) -> ZmqTeacher:
    return connect(server.port, **({"n_vocab": N_VOCAB, "k": K} | options))


def run(script: Script, n: int = 12, *, response: tuple[int, int] = (1, 40), **options: Any) -> tuple[list[int], Any]:
    """Score `n` rollouts, check that each reply is for its sequence, and return (order of completion, stats)."""
    rollouts = random_rollouts(n, N_VOCAB, response=response)
    with ScriptedServer(script) as server, client(server, **options) as teacher:
        order = []
        for index, scores in score(teacher, rollouts):
            np.testing.assert_array_equal(scores.ids[:, 0], rollouts[index].response_ids)
            order.append(index)
        return order, teacher.stats


def always_valid(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
    return [valid_reply(request, tokens)]


def ignore(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
    return []
