"""A real broker with scripted clients and workers: bare sockets, whose every byte a test chooses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from teacher_server.broker.broker import Broker
from teacher_server.wire.protocol import ID_BYTES, ScoreRequest, StatusReply, StatusRequest, as_frame, replies, requests
from teacher_server.wire.status import decode_status
from teacher_server.wire.worker_protocol import Assignment, Done, Part, WorkerHello, from_worker, to_worker
from tests.service.messages import make_hello, make_request, make_tokens

TIMEOUT_MS = 5000


class Peer:
    """A DEALER socket with a random identity."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, os.urandom(ID_BYTES))
        self.socket.connect(endpoint)

    def frames(self) -> list[bytes]:
        assert self.socket.poll(TIMEOUT_MS), "no message"
        return self.socket.recv_multipart()

    def receives_nothing(self, for_ms: int = 200) -> bool:
        return not self.socket.poll(for_ms)


class Client(Peer):
    def send(self, request: Any, *frames: Any) -> None:
        self.socket.send_multipart([requests.encode(request), *frames])

    def score(self, tokens: np.ndarray | None = None, **changes: Any) -> ScoreRequest:
        tokens = make_tokens() if tokens is None else tokens
        request = make_request(tokens, **changes)
        self.send(request, as_frame(tokens))
        return request

    def receive(self) -> tuple[Any, list[bytes]]:
        header, *frames = self.frames()
        return replies.decode(header), frames

    def status(self) -> Any:
        self.send(StatusRequest(request_id=bytes(ID_BYTES)))
        header, frames = self.receive()
        assert isinstance(header, StatusReply)
        return decode_status(header, list(frames))


class ScriptedWorker(Peer):
    def __init__(self, context: zmq.Context[Any], endpoint: str, **changes: Any) -> None:
        super().__init__(context, endpoint)
        self.description = make_hello(**changes)
        self.hello()

    def hello(self, **changes: Any) -> None:
        fields = {name: getattr(self.description, name) for name in self.description.__struct_fields__}
        self.socket.send(from_worker.encode(WorkerHello(**(fields | changes))))

    def receive(self) -> tuple[Any, list[bytes]]:
        header, *frames = self.frames()
        return to_worker.decode(header), frames

    def job(self) -> tuple[bytes, ScoreRequest, np.ndarray]:
        message, (header, *frames) = self.receive()
        assert isinstance(message, Assignment)
        self.stream_id = message.stream_id
        request = requests.decode(header)
        tokens = np.frombuffer(frames[0], np.int32) if frames else np.zeros(0, np.int32)
        return message.job_id, request, tokens  # type: ignore[return-value]

    def reply(self, job_id: bytes, header: Any, frames: Any = (), *, final: bool = True) -> None:
        message = Done(job_id=job_id) if final else Part(job_id=job_id)
        self.socket.send_multipart([from_worker.encode(message), replies.encode(header), *frames])


class Rig:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.endpoint = f"ipc://{folder}/workers-{os.urandom(3).hex()}"
        self.broker = Broker("127.0.0.1", 0, self.endpoint, **settings)
        self.broker.start()
        self.context = zmq.Context()

    def client(self) -> Client:
        return Client(self.context, f"tcp://127.0.0.1:{self.broker.port}")

    def worker(self, **changes: Any) -> ScriptedWorker:
        """Start a worker, and wait until it has joined or was refused."""
        worker = ScriptedWorker(self.context, self.endpoint, **changes)
        self.event("ready", "refused")
        return worker

    def event(self, *kinds: str) -> tuple[str, str, str]:
        """Return the next event of one of these kinds. Other events are dropped."""
        while True:
            event = self.broker.events.get(timeout=TIMEOUT_MS / 1000)
            if event.kind in kinds:
                return event

    def close(self) -> None:
        was_alive = self.broker.alive
        self.broker.stop()
        self.context.destroy(linger=0)
        assert was_alive, "the broker died"
