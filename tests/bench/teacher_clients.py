"""Run the clients of the load benchmark: each process keeps a few requests in flight and records their latencies.

Both kinds send the same requests and receive replies of the same size: the trainer's `ZmqTeacher`, which returns
validated arrays, and a bare DEALER socket, which does not parse replies and so also works with an echo server.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

import numpy as np
import zmq

from gkd.types import Rollout, TeacherScores
from teacher_server.wire.protocol import ScoreRequest, as_frame, replies, requests
from tests.service.harness import connect, random_rollouts, submit
from tests.service.messages import make_reply, make_request, make_scores

VOCAB, N_PROMPT, N_RESPONSE = 32_768, 40, 300
N_TOKENS = N_PROMPT + N_RESPONSE
N_CLIENTS, IN_FLIGHT = 8, 4
_N_KINDS = 32  # different sequences of one client


class Task(NamedTuple):
    """Times on the system-wide monotonic clock."""

    kind: Literal["teacher", "bare"]
    port: int
    k: int
    start_s: float  # end of the warm-up
    stop_s: float


class Measured(NamedTuple):
    latencies_s: np.ndarray  # [n] of the requests completed between start and stop
    cpu_s: float  # of this client in that time


def serve_client(pipe: Connection, seed: int) -> None:
    sequences = _sequences(seed)
    pipe.send("ready")
    while True:
        task: Task = pipe.recv()
        clock = _Clock(task)
        (_ask_teacher if task.kind == "teacher" else _ask_bare)(task, sequences, clock)
        pipe.send(clock.measured())


class _Clock:
    """Record replies. `measured` returns those between start and stop."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._done: list[tuple[float, float]] = []  # (when, how long it took)
        self._cpu: list[tuple[float, float]] = []

    def note(self, sent_s: float) -> bool:
        """Record one reply. Return False when the time is over."""
        now_s = time.monotonic()
        self._done.append((now_s, now_s - sent_s))
        self._cpu.append((now_s, time.process_time()))
        return now_s < self._task.stop_s

    def measured(self) -> Measured:
        inside = [took for when, took in self._done if self._task.start_s <= when < self._task.stop_s]
        when, cpu = np.array(self._cpu).T
        used = np.interp([self._task.start_s, self._task.stop_s], when, cpu)
        return Measured(np.array(inside), float(used[1] - used[0]))


def _ask_teacher(task: Task, sequences: list[Rollout], clock: _Clock) -> None:
    """Submit each request in the callback of an earlier one, in the client's own thread, to avoid thread switches."""
    ended = threading.Semaphore(0)
    with connect(task.port, k=task.k, n_vocab=VOCAB, n_in_flight=IN_FLIGHT, wire="fp16") as teacher:

        def ask(index: int) -> None:
            sent_s = time.monotonic()

            def answered(future: Future[list[TeacherScores]]) -> None:
                if future.exception() is None and clock.note(sent_s):
                    ask(index + IN_FLIGHT)
                else:
                    ended.release()

            future = submit(teacher, sequences[index % _N_KINDS])
            futures[index % IN_FLIGHT] = future
            future.add_done_callback(answered)

        futures: dict[int, Future[list[TeacherScores]]] = {}
        for index in range(IN_FLIGHT):
            ask(index)
        for _ in range(IN_FLIGHT):
            ended.acquire()
        for future in futures.values():
            future.result()  # raises the request's error


def _ask_bare(task: Task, sequences: list[Rollout], clock: _Clock) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{task.port}")
    tokens = [np.concatenate([one.prompt_ids, one.response_ids]) for one in sequences]
    sent: list[float] = []  # replies may be reordered: then two latencies are swapped

    def ask() -> None:
        row = tokens[len(sent) % _N_KINDS]
        request = make_request(row, prompt_length=N_PROMPT, k=task.k, n_vocab=VOCAB, deadline_s=120.0)
        header = requests.encode(request)
        sent.append(time.monotonic())
        socket.send_multipart([header, as_frame(row)], copy=False)

    for _ in range(IN_FLIGHT):
        ask()
    n_answered = 0
    while n_answered < len(sent):
        head, *frames = socket.recv_multipart(copy=False)
        if not frames:
            raise RuntimeError(f"no scores: {replies.decode(head.buffer)}")
        if clock.note(sent[n_answered]):
            ask()
        n_answered += 1
    context.destroy(linger=0)


# The echo


def serve_echo_proxy(pipe: Connection, endpoint: str) -> None:
    """A ROUTER for the clients, a DEALER for the worker, and between them libzmq's own loop."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = front.bind_to_random_port("tcp://127.0.0.1")
    back.bind(endpoint)
    pipe.send(port)
    zmq.proxy(front, back)


def serve_echo_worker(pipe: Connection, endpoint: str) -> None:
    """Answers every request with the same frames, which are as large as a real answer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    answers = {k: answer_frames(k) for k in pipe.recv()}
    pipe.send("ready")
    while True:
        client, head, _ = socket.recv_multipart(copy=False)
        request = requests.decode(head.buffer)  # only to know how much to send
        assert isinstance(request, ScoreRequest)
        socket.send_multipart([client, *answers[request.k]], copy=False)


def answer_frames(k: int) -> list[bytes | memoryview]:
    """[header, planes] of one answer."""
    tokens = np.zeros(N_TOKENS, np.int32)
    request = make_request(tokens, prompt_length=N_PROMPT, k=k)
    header, planes = make_reply(request, tokens, make_scores(N_RESPONSE, k, max_id=VOCAB - 1))
    return [replies.encode(header), *planes]


def _sequences(seed: int) -> list[Rollout]:
    """All of `N_TOKENS` tokens, so that a request is a request."""
    made = random_rollouts(_N_KINDS, VOCAB, seed=seed, response=(N_TOKENS, N_TOKENS))
    return [
        Rollout(
            prompt_id=one.prompt_id,
            sample_index=0,
            prompt_ids=one.response_ids[:N_PROMPT],
            response_ids=one.response_ids[N_PROMPT:],
            rollout_logprobs=one.rollout_logprobs[N_PROMPT:],
            version_spans=one.version_spans,
            finish_reason="length",
        )
        for one in made
    ]
