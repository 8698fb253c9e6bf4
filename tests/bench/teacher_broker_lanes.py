"""Lanes through the real broker: ready answers come in over ipc as a worker's, and go out over tcp to a client.

Only the engine and `pack_topk` are missing at the worker's end: its link, its header for each request
and all that the broker does with a message are the real ones.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection

import zmq

from gkd.types import Rollout
from teacher_server.broker.broker import Broker
from teacher_server.wire.payload import check_reply
from teacher_server.wire.protocol import ID_BYTES, ProtocolError, ScoreReply, as_frame, replies, requests, token_digest
from teacher_server.wire.sockets import set_common_options
from teacher_server.worker.link import End, Work, WorkerLink
from tests.bench.teacher_children import Child
from tests.bench.teacher_lanes import ChildLane, Run
from tests.bench.teacher_payloads import (
    N_ENTRIES,
    N_PROMPT,
    N_ROWS,
    N_SEQUENCES,
    VOCAB,
    WINDOW,
    K,
    make_all_packed,
    make_tokens,
    make_topk_request,
)
from tests.service.harness import connect, score
from tests.service.messages import make_hello


class _BrokerLane(ChildLane):
    """A broker and a worker-like sender, a process each."""

    n_sequences = 4 * N_SEQUENCES

    def __init__(self) -> None:
        super().__init__()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench."))
        endpoint = f"ipc://{folder}/workers"
        broker = self._stack.enter_context(Child(serve_broker, endpoint))
        self.port: int = broker.answer()
        worker = self._stack.enter_context(Child(serve_worker, endpoint))
        worker.answer()
        self.pids = {"broker": broker.pid, "worker": worker.pid}


class BrokerMessages(_BrokerLane):
    """The client is a socket that decodes and checks, as in the lane without a broker."""

    name = "through the broker, checked"

    def __init__(self) -> None:
        super().__init__()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.destroy, linger=0)
        self._dealer = context.socket(zmq.DEALER)
        set_common_options(self._dealer)
        self._dealer.setsockopt(zmq.IDENTITY, b"c" + os.urandom(ID_BYTES - 1))
        self._dealer.connect(f"tcp://127.0.0.1:{self.port}")
        self._tokens = [make_tokens(index) for index in range(N_SEQUENCES)]

    def run(self, n_sequences: int) -> Run:
        n_sent = n_bytes = 0
        start_s = time.perf_counter()
        for n_got in range(n_sequences):
            while n_sent < n_sequences and n_sent - n_got < WINDOW:
                tokens = self._tokens[n_sent % N_SEQUENCES]
                request = requests.encode(make_topk_request(tokens, N_PROMPT, K))
                self._dealer.send_multipart([request, as_frame(tokens)])
                n_sent += 1
            head, *frames = self._dealer.recv_multipart(copy=False)
            reply = replies.decode(head.buffer)
            if not isinstance(reply, ScoreReply):
                raise ProtocolError(f"expected scores, got {reply}")
            check_reply(reply, [frame.buffer for frame in frames])
            n_bytes += len(head) + sum(map(len, frames))
        return Run(time.perf_counter() - start_s, n_sequences * N_ENTRIES, n_bytes)


class BrokerClient(_BrokerLane):
    """The client is the trainer's: it ends with validated arrays."""

    name = "through the broker to ZmqTeacher"
    n_sequences = 2 * N_SEQUENCES

    def __init__(self) -> None:
        super().__init__()
        teacher = connect(self.port, k=K, n_vocab=VOCAB, n_in_flight=WINDOW, wire="fp16")
        self._teacher = self._stack.enter_context(teacher)
        self._rollouts = [_make_rollout(index) for index in range(N_SEQUENCES)]
        self._bytes = sum(packed.n_bytes for packed in make_all_packed())

    def run(self, n_sequences: int) -> Run:
        n_times = n_sequences // N_SEQUENCES
        start_s = time.perf_counter()
        n_got = sum(1 for _ in score(self._teacher, self._rollouts * n_times))
        return Run(time.perf_counter() - start_s, n_got * N_ENTRIES, n_times * self._bytes)


def _make_rollout(index: int) -> Rollout:
    tokens = make_tokens(index)
    # Only the tokens are sent; the rest is for the trainer.
    return Rollout(index, 0, tokens[:N_PROMPT], tokens[N_PROMPT:], tokens[:0].astype("f4"), (), "length")


def serve_broker(pipe: Connection, endpoint: str) -> None:
    broker = Broker("127.0.0.1", 0, endpoint)
    broker.start()
    pipe.send(broker.port)
    pipe.recv()  # for ever: the parent ends this process


def serve_worker(pipe: Connection, endpoint: str) -> None:
    answers = make_all_packed()
    index_of = {token_digest(make_tokens(index)): index for index in range(N_SEQUENCES)}
    n_tokens = N_PROMPT + N_ROWS
    hello = make_hello(vocab_size=VOCAB, max_tokens=n_tokens, credit_tokens=WINDOW * n_tokens, n_streams=WINDOW)
    link = WorkerLink(endpoint, hello)
    pipe.send("ready")
    while not isinstance(arrival := link.inbox.get(), End):
        if not isinstance(arrival, Work):
            continue
        request = requests.decode(arrival.frames[0].buffer)
        answer = answers[index_of[token_digest(arrival.frames[1].buffer)]]
        answer.head.request_id = request.request_id  # type: ignore[union-attr]
        link.send_reply(arrival.job.job_id, partial(list, [replies.encode(answer.head), *answer.frames]))
    raise RuntimeError(f"the broker dismissed the worker: {arrival.reason}")
