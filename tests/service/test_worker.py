"""The real compute loop and link of a worker, with a scripted broker on a bare ROUTER.

The engine is a stub, so that tests can make it fail or hang, and count its calls.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import zmq

from teacher_server.engines.base import ScoreParams, Scores, TokenSequence
from teacher_server.wire.payload import unpack_rows, unpack_topk
from teacher_server.wire.protocol import (
    STREAM_WINDOW,
    ErrorReply,
    RowsReply,
    ScoreReply,
    as_frame,
    replies,
    requests,
    token_digest,
)
from teacher_server.wire.worker_protocol import (
    Assignment,
    Dismiss,
    JobCancel,
    JobReceived,
    Part,
    WorkerHello,
    from_worker,
    to_worker,
)
from teacher_server.worker.compute import Worker
from teacher_server.worker.link import WorkerLink
from tests.processes import wait_until
from tests.service.messages import make_hello, make_request, make_scores, make_tokens

pytestmark = pytest.mark.service
TIMEOUT_MS = 5000
WIDE = 300_000  # columns: three float32 rows a message, so that 30 rows are more than a window


class RowNumbers:
    """A matrix of row numbers that counts the computed rows."""

    dtype = "float32"

    def __init__(self, n_rows: int, n_cols: int) -> None:
        self.n_rows, self.n_cols = n_rows, n_cols
        self.n_computed = 0
        self.closed = False

    def rows(self, start: int, stop: int) -> np.ndarray:
        assert start == self.n_computed, "rows must be computed in order, each once"
        self.n_computed = stop
        return np.repeat(np.arange(start, stop, dtype=np.float32)[:, None], self.n_cols, axis=1)

    def close(self) -> None:
        self.closed = True


class StubEngine:
    """Return random `topk` scores and `logits` of row numbers. RuntimeError on token 13, ZeroDivisionError on 14."""

    name, device, dtype, vocab_size, hidden_size, max_tokens = "stub", "cpu", "float32", 50, 8, 100
    has_plain_head = True

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.delay_s = 0.0
        self.streams: list[RowNumbers] = []

    def score(self, batch: Sequence[TokenSequence], params: ScoreParams) -> list[Scores]:
        self.batches.append(len(batch))
        time.sleep(self.delay_s)
        for sequence in batch:
            if 13 in sequence.token_ids:
                raise RuntimeError("out of memory")
            if 14 in sequence.token_ids:
                raise ZeroDivisionError("NaN")
        if params.signal == "topk":
            return [make_scores(sequence.n_response, params.k) for sequence in batch]
        self.streams += [RowNumbers(sequence.n_response, WIDE) for sequence in batch]
        return list(self.streams[-len(batch) :])


class ScriptedBroker:
    """A ROUTER connected to one worker, whose loop runs in a thread."""

    def __init__(self, engine: StubEngine) -> None:
        self._context = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.link = WorkerLink(f"tcp://127.0.0.1:{self.port}", make_hello())
        self.reasons: list[str] = []  # why the loop ended
        worker = Worker(engine, self.link, "f", "w", max_batch_tokens=200)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._run, args=(worker,), daemon=True)
        self.thread.start()
        self.identity = self.next_hello()[0]

    def _run(self, worker: Worker) -> None:
        try:
            self.reasons.append(worker.run())
        except RuntimeError as error:
            self.reasons.append(str(error))

    def receive(self) -> tuple[bytes, Any, list[bytes]]:
        assert self.router.poll(TIMEOUT_MS), "no message"
        identity, header, *frames = self.router.recv_multipart()
        return identity, from_worker.decode(header), frames

    def next_hello(self) -> tuple[bytes, WorkerHello]:
        while True:
            identity, message, _ = self.receive()
            if isinstance(message, WorkerHello):
                return identity, message

    def reply(self) -> tuple[bool, Any, list[bytes]]:
        """Return (whether it is final, header for the client, frames) of the next result."""
        while True:
            _, message, frames = self.receive()
            if not isinstance(message, WorkerHello):
                return not isinstance(message, Part), replies.decode(frames[0]), frames[1:]

    def receives_only_hellos(self, for_s: float) -> bool:
        end_s = time.monotonic() + for_s
        while self.router.poll(max(0, int((end_s - time.monotonic()) * 1000))):
            if not isinstance(self.receive()[1], WorkerHello):
                return False
        return True

    def send(self, message: Any, *frames: Any) -> None:
        self.router.send_multipart([self.identity, to_worker.encode(message), *frames])

    def assign(self, job: int, tokens: np.ndarray, remaining_s: float = 9.0, **changes: Any) -> Any:
        request = make_request(tokens, **changes)
        assignment = Assignment(
            job_id=bytes([job] * 16), stream_id=bytes([job] * 16), waited_s=1.0, remaining_s=remaining_s
        )
        self.send(assignment, requests.encode(request), as_frame(tokens))
        return request

    def restart(self) -> None:
        """Replace the ROUTER by a new one at the same address."""
        self.router.close(linger=0)
        self.router = self._context.socket(zmq.ROUTER)

        def is_bound() -> bool:  # the old socket releases the port asynchronously
            with contextlib.suppress(zmq.ZMQError):
                self.router.bind(f"tcp://127.0.0.1:{self.port}")
                return True
            return False

        wait_until(is_bound, 30.0, "the port")

    def close(self) -> None:
        end_s = time.monotonic() + 10
        self.send(Dismiss())
        while self.thread.is_alive() and time.monotonic() < end_s:
            self.thread.join(timeout=0.1)
            if self.router.poll(0):  # a new connection has a new identity
                self.identity = self.receive()[0]
                self.send(Dismiss())
        assert not self.thread.is_alive(), "the worker did not exit"
        self.link.close()
        self._context.destroy(linger=0)


@pytest.fixture
def engine() -> StubEngine:
    return StubEngine()


@pytest.fixture
def broker(engine: StubEngine) -> Iterator[ScriptedBroker]:
    broker = ScriptedBroker(engine)
    yield broker
    broker.close()


def harmless(n: int) -> np.ndarray:
    return make_tokens(n) % 10


def tokens_with(token: int) -> np.ndarray:
    return np.array([0, token, 5], np.int32)


def test_a_sequence_that_fails_does_not_fail_its_batch(broker: ScriptedBroker) -> None:
    """Fails if one bad sequence fails its batch, an expired one is computed, or the loop ends."""
    plan = {0: (1, 9.0), 1: (13, 9.0), 2: (2, 9.0), 3: (3, -0.0), 4: (60, 9.0), 5: (14, 9.0)}
    jobs = {
        broker.assign(job, tokens_with(token), remaining_s).request_id: job
        for job, (token, remaining_s) in plan.items()
    }
    replies_by_job = {}
    for _ in plan:
        final, header, _ = broker.reply()
        assert final
        replies_by_job[jobs[header.request_id]] = header
    codes = {job: reply.code for job, reply in replies_by_job.items() if isinstance(reply, ErrorReply)}
    assert codes == {1: "engine", 3: "deadline", 4: "bad_request", 5: "engine"}
    assert sorted(job for job, reply in replies_by_job.items() if isinstance(reply, ScoreReply)) == [0, 2]
    assert replies_by_job[0].queue_s >= 1.0, "queue_s must include the time in the broker"


def test_a_request_of_several_sequences_has_one_reply(broker: ScriptedBroker, engine: StubEngine) -> None:
    """Fails if the rows of its sequences are not one after the other, or if several batches have several replies."""
    lengths = [(3, 90), (10, 12), (5, 80), (1, 40)]  # several batches of at most 200 padded tokens
    tokens = harmless(sum(total for _, total in lengths))
    request = broker.assign(0, tokens, lengths=lengths, prompt_length=sum(prompt for prompt, _ in lengths))
    final, header, frames = broker.reply()
    assert final and (header.request_id, header.n_rows) == (request.request_id, request.n_response)
    assert header.token_digest == token_digest(tokens)
    assert len(engine.batches) > 1 and sum(engine.batches) == len(lengths)
    got = unpack_topk(header, [memoryview(frame) for frame in frames])
    expected = np.concatenate([make_scores(total - prompt, 4).ids for prompt, total in lengths])
    np.testing.assert_array_equal(got.ids, expected)
    assert broker.receives_only_hellos(0.3)


@pytest.mark.parametrize(("token", "code"), [(13, "engine"), (60, "bad_request")])
def test_an_error_names_the_sequence_of_its_request(broker: ScriptedBroker, token: int, code: str) -> None:
    """Fails if the client cannot tell which sequence failed, or if the rest of the request is sent after the error."""
    sequences = [tokens_with(1), tokens_with(2), tokens_with(token), tokens_with(3)]
    broker.assign(0, np.concatenate(sequences), lengths=[(1, 3)] * 4, prompt_length=4)
    final, header, _ = broker.reply()
    assert final and isinstance(header, ErrorReply) and (header.code, header.sequence) == (code, 2)
    broker.assign(1, tokens_with(4))
    assert isinstance(broker.reply()[1], ScoreReply)


def test_waiting_requests_share_a_batch(broker: ScriptedBroker, engine: StubEngine) -> None:
    """Fails if requests that fit into one batch are computed one by one."""
    tokens = harmless(20)
    engine.delay_s = 0.2  # the others arrive during the first batch
    for job in range(21):
        broker.assign(job, tokens)
    for _ in range(21):
        _, header, _ = broker.reply()
        assert header.token_digest == token_digest(tokens)
    assert sum(engine.batches) == 21 and len(engine.batches) <= 5, engine.batches


def test_a_stream_waits_for_receipts(broker: ScriptedBroker, engine: StubEngine) -> None:
    """Fails if logits are computed ahead of the window: for a long sequence of a real model they need 2.4 GB."""
    request = broker.assign(1, harmless(31), signal="logits", prompt_length=1)
    seen: list[tuple[int, int]] = []
    rows = 0
    while rows < 30:
        for _ in range(min(STREAM_WINDOW, 10 - len(seen)) if not seen else min(4, 10 - len(seen))):
            final, header, frames = broker.reply()
            assert isinstance(header, RowsReply) and header.request_id == request.request_id
            assert (unpack_rows(header, list(frames))[:, 0] == np.arange(header.start, header.stop)).all()
            seen.append((header.start, header.stop))
            rows = header.stop
            assert final == (rows == 30)
        if rows < 30:
            assert broker.receives_only_hellos(0.2), "the window is full"
            assert engine.streams[0].n_computed == rows
            broker.send(JobReceived(job_id=bytes([1] * 16), stream_id=bytes(16), n_messages=99))
            assert broker.receives_only_hellos(0.1), "a receipt for another stream must be ignored"
            receipt = JobReceived(job_id=bytes([1] * 16), stream_id=header.stream_id, n_messages=len(seen))
            broker.send(receipt)
    assert seen == [(start, start + 3) for start in range(0, 30, 3)]
    wait_until(lambda: engine.streams[0].closed, 30.0, "the stream to close")  # after its last message


def test_other_requests_are_served_while_a_stream_waits(broker: ScriptedBroker) -> None:
    """Fails if a client that stops reading blocks the requests of other clients."""
    broker.assign(1, harmless(31), signal="logits", prompt_length=1)
    for _ in range(STREAM_WINDOW):
        broker.reply()
    broker.assign(2, harmless(20))
    final, header, _ = broker.reply()
    assert final and isinstance(header, ScoreReply)


def test_a_cancelled_stream_is_closed(broker: ScriptedBroker, engine: StubEngine) -> None:
    """Fails if a cancelled stream keeps its hidden states."""
    broker.assign(1, harmless(31), signal="logits", prompt_length=1)
    for _ in range(STREAM_WINDOW):
        broker.reply()
    broker.send(JobCancel(job_id=bytes([1] * 16)))
    wait_until(lambda: engine.streams[0].closed, 30.0, "the stream to close")
    assert broker.receives_only_hellos(0.2)


def test_a_broken_connection_is_a_new_worker(broker: ScriptedBroker, engine: StubEngine) -> None:
    """Fails if requests of the old connection are computed again, or the worker does not rejoin a new broker."""
    broker.assign(1, harmless(31), signal="logits", prompt_length=1)
    for _ in range(STREAM_WINDOW):
        broker.reply()
    broker.restart()
    identity, _ = broker.next_hello()
    assert identity != broker.identity
    broker.identity = identity
    broker.assign(2, harmless(20))
    assert isinstance(broker.reply()[1], ScoreReply)
    wait_until(lambda: engine.streams[0].closed, 30.0, "the stream of the old connection to close")


def test_leave_is_announced_and_dismissal_ends_the_loop(broker: ScriptedBroker) -> None:
    """Fails if a leaving worker drops requests, or never exits."""
    broker.link.leave()
    while not broker.next_hello()[1].leaving:
        pass
    broker.assign(1, harmless(20))
    assert isinstance(broker.reply()[1], ScoreReply), "requests in flight must be completed"
    broker.send(Dismiss())
    broker.thread.join(timeout=30)
    assert broker.reasons == [""]


def test_leaving_does_not_wait_for_an_unreachable_broker(broker: ScriptedBroker) -> None:
    """Fails if SIGTERM does not end a worker without a broker before a service manager's time-out."""
    broker.router.close(linger=0)
    broker.link.leave()
    broker.thread.join(timeout=30)
    assert broker.reasons == [""]
    broker.restart()


def test_refused_connections_are_retried_with_a_backoff() -> None:
    """Fails if a wrong key causes a thousand connections per second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        link = WorkerLink(f"tcp://127.0.0.1:{listener.getsockname()[1]}", make_hello())
        n_connections, end_s = 0, time.monotonic() + 1.5
        while time.monotonic() < end_s:
            with contextlib.suppress(TimeoutError):
                listener.accept()[0].close()
                n_connections += 1
        assert 2 <= n_connections <= 12
        link.leave()
        assert link.inbox.get(timeout=5) is not None
        link.close()


def test_a_failed_device_ends_the_worker(broker: ScriptedBroker) -> None:
    """Fails if a worker with a failed device refuses every request instead of exiting."""
    for job, token in enumerate((13, 14, 13, 13, 13)):  # 14: caused by the model, not by the device
        assert broker.reasons == []
        broker.assign(job, tokens_with(token))
        assert broker.reply()[1].code == "engine"
    broker.thread.join(timeout=30)
    assert "out of memory" in broker.reasons[0]


_HANGS = """
import threading
from teacher_server.worker.link import WorkerLink
from tests.processes import wait_until
from tests.service.messages import make_hello
link = WorkerLink("tcp://127.0.0.1:9", make_hello(), compute_timeout_s=0.3)
with link.computing():
    threading.Event().wait()
"""


def test_a_batch_that_hangs_ends_the_process() -> None:
    """Fails if a worker with a hung engine keeps its requests forever, because its heartbeats continue."""
    ended = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 3 and "0.3 s" in ended.stderr
