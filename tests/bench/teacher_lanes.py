"""Lanes from one process to another without a server: memcpy, raw TCP, and protocol messages over one ZMQ hop.

A lane owns its processes. `run(n)` moves `n` sequences of `teacher_payloads` into this process; the
clock runs from asking for the first one to holding the last one.
"""

from __future__ import annotations

import contextlib
import socket
import time
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

import numpy as np
import zmq

from teacher_server.wire.payload import check_reply, unpack_topk
from teacher_server.wire.protocol import ProtocolError, ScoreReply, replies
from teacher_server.wire.sockets import bind, make_router, set_common_options
from tests.bench.teacher_children import Child
from tests.bench.teacher_payloads import (
    N_ENTRIES,
    N_SEQUENCES,
    WINDOW,
    Packed,
    make_all_packed,
    make_all_scores,
    make_head,
    pack,
)


class Run(NamedTuple):
    seconds: float
    n_entries: int
    n_bytes: int  # that this lane moved for them


class Lane(Protocol):
    name: str
    n_sequences: int  # of one run: enough for some tenths of a second

    def run(self, n_sequences: int) -> Run: ...

    def close(self) -> None: ...


class ChildLane:
    """Base class of the lanes that use child processes."""

    name = ""
    n_sequences = N_SEQUENCES

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ChildLane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()


class Memcpy:
    """The payload copied from one place of this process's memory to another."""

    name = "memcpy in one process"
    n_sequences = 20 * N_SEQUENCES

    def __init__(self) -> None:
        self._from = _joined(make_all_packed())
        self._to = np.zeros_like(self._from)

    def run(self, n_sequences: int) -> Run:
        start_s = time.perf_counter()
        for _ in range(n_sequences // N_SEQUENCES):
            np.copyto(self._to, self._from)
        return Run(time.perf_counter() - start_s, n_sequences * N_ENTRIES, n_sequences // N_SEQUENCES * self._to.nbytes)

    def close(self) -> None:
        """Holds nothing but memory."""


class RawTcp(ChildLane):
    """64 packed answers as one buffer: `sendall` there, `recv_into` memory that is there already here."""

    name = "raw TCP, one large buffer"
    n_sequences = 10 * N_SEQUENCES

    def __init__(self) -> None:
        super().__init__()
        child = self._stack.enter_context(Child(_serve_tcp))
        port, n_bytes = child.answer()
        self._buffer = np.zeros(n_bytes, np.uint8)
        self._socket = self._stack.enter_context(socket.create_connection(("127.0.0.1", port)))

    def run(self, n_sequences: int) -> Run:
        n_times = n_sequences // N_SEQUENCES
        view = self._buffer.data
        start_s = time.perf_counter()
        self._socket.sendall(bytes([n_times]))
        for _ in range(n_times):
            at = 0
            while at < len(view):
                n_here = self._socket.recv_into(view[at:])
                if n_here == 0:
                    raise RuntimeError("the sender of the raw TCP lane has ended")
                at += n_here
        return Run(time.perf_counter() - start_s, n_sequences * N_ENTRIES, n_times * len(view))


class Messages(ChildLane):
    """Ready messages through a ROUTER and a DEALER; here each is received, decoded and checked as a broker does."""

    name = "protocol messages, checked"
    n_sequences = 10 * N_SEQUENCES
    _packs = False

    def __init__(self) -> None:
        super().__init__()
        child = self._stack.enter_context(Child(_serve_messages, self._packs))
        port = child.answer()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.destroy, linger=0)
        self._dealer = context.socket(zmq.DEALER)
        set_common_options(self._dealer)
        self._dealer.setsockopt(zmq.RCVHWM, WINDOW)
        self._dealer.connect(f"tcp://127.0.0.1:{port}")

    def run(self, n_sequences: int) -> Run:
        n_bytes = 0
        start_s = time.perf_counter()
        self._dealer.send(n_sequences.to_bytes(4, "little"))
        for _ in range(n_sequences):
            head, *frames = self._dealer.recv_multipart(copy=False)
            reply = replies.decode(head.buffer)
            if not isinstance(reply, ScoreReply):
                raise ProtocolError(f"{type(reply).__name__} is no answer")
            self._take(reply, [frame.buffer for frame in frames])
            n_bytes += len(head) + sum(map(len, frames))
        return Run(time.perf_counter() - start_s, n_sequences * N_ENTRIES, n_bytes)

    def _take(self, reply: ScoreReply, frames: list[memoryview]) -> None:
        check_reply(reply, frames)


class Scores(Messages):
    """As above, but the sender starts at the engine's arrays and this side ends at the client's."""

    name = "with pack_topk and unpack_topk"
    n_sequences = 4 * N_SEQUENCES
    _packs = True

    def _take(self, reply: ScoreReply, frames: list[memoryview]) -> None:
        unpack_topk(reply, frames)


# The other end


def _serve_tcp(pipe: Connection) -> None:
    payload = _joined(make_all_packed()).data
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((listener.getsockname()[1], payload.nbytes))
        connection, _ = listener.accept()
    with connection:
        while n_times := connection.recv(1):
            for _ in range(n_times[0]):
                connection.sendall(payload)


def _serve_messages(pipe: Connection, packs: bool) -> None:
    router = make_router(zmq.Context(), backlog=WINDOW)  # full: `send` waits
    port = bind(router, "tcp://127.0.0.1:0", "port")
    scores = make_all_scores() if packs else []
    ready = [] if packs else [(replies.encode(packed.head), packed.frames) for packed in make_all_packed()]
    heads = [make_head(index) for index in range(N_SEQUENCES)]
    pipe.send(port)
    while True:
        client, count = router.recv_multipart()
        for i in range(int.from_bytes(count, "little")):
            i %= N_SEQUENCES
            if packs:
                packed = pack(heads[i], scores[i])
                message = replies.encode(packed.head), packed.frames
            else:
                message = ready[i]
            router.send_multipart([client, message[0], *message[1]], copy=False)


def _joined(messages: list[Packed]) -> np.ndarray:
    """All frames one after the other, [bytes] uint8."""
    parts = [np.frombuffer(part, np.uint8) for packed in messages for part in packed.frames]
    return np.concatenate(parts)
