"""Streams of matrices: the client gets each row exactly once, also after faults."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from gkd.errors import TeacherError, TeacherUnavailable
from gkd.scoring.teacher.client import ZmqTeacher
from gkd.types import Rollout
from teacher_server.wire.protocol import STREAM_WINDOW, Cancel, HeadRequest, Received, ScoreRequest, Signal
from tests.processes import wait_until
from tests.service.harness import connect, random_rollouts
from tests.service.scripted import N_HIDDEN, N_VOCAB, Message
from tests.service.scripted_streams import Stream, StreamingServer, matrix

pytestmark = pytest.mark.service
N_ROWS = 40  # five windows of one row a message


def client(server: StreamingServer, **options: Any) -> ZmqTeacher:
    return connect(server.port, **({"n_vocab": N_VOCAB, "request_timeout_s": 60.0} | options))


def rollout(n_rows: int = N_ROWS) -> Rollout:
    return random_rollouts(1, N_VOCAB, response=(n_rows, n_rows))[0]


def rows(teacher: ZmqTeacher, signal: Signal = "hidden", n_rows: int = N_ROWS, timeout_s: float = 5) -> np.ndarray:
    """Request a matrix, check that it is the server's, and return it, [n_rows, columns]."""
    (scores,) = teacher.submit([rollout(n_rows)], [signal]).result(timeout_s)
    found = scores.hidden if signal == "hidden" else scores.logits
    np.testing.assert_array_equal(found, matrix(signal, n_rows, N_HIDDEN if signal == "hidden" else N_VOCAB))
    return found


def test_hidden_states_and_the_head_are_assembled() -> None:
    """Fails if a row is misplaced, or the transfer stops at the end of the window."""
    with StreamingServer(rows_a_message=3) as server, client(server) as teacher:
        hidden = rows(teacher)
        head = teacher.lm_head()
    np.testing.assert_array_equal(head, matrix("head", N_VOCAB, N_HIDDEN))
    assert hidden.dtype == head.dtype == np.float32
    assert len(server.of(HeadRequest)) == 1 and len(server.of(ScoreRequest)) == 1
    assert max(stream.most_ahead for stream in server.streams) <= STREAM_WINDOW


def test_many_streams_and_scores_share_one_client() -> None:
    """Fails if streams are mixed up, or one of them blocks the others."""
    with StreamingServer() as server, client(server) as teacher:
        logits = teacher.submit([rollout()], ["logits"])
        futures = [teacher.submit([rollout(n)], ["hidden"]) for n in (5, 17, 33)]
        for n, future in zip((5, 17, 33), futures, strict=True):
            np.testing.assert_array_equal(future.result(timeout=30)[0].hidden, matrix("hidden", n, N_HIDDEN))
        np.testing.assert_array_equal(logits.result(timeout=30)[0].logits, matrix("logits", N_ROWS, N_VOCAB))


@pytest.mark.parametrize("signal", ["hidden", "logits"])
@pytest.mark.parametrize("at", [1, 13, N_ROWS - 1])
def test_another_worker_takes_over_in_the_middle(signal: Signal, at: int) -> None:
    """Fails if rows are repeated after a retry, or rows of the two workers are mixed up."""
    taken_over = threading.Event()
    with StreamingServer() as server, client(server) as teacher:

        def on_next(stream: Stream, index: int) -> list[Message]:
            if index == at and not taken_over.is_set():
                taken_over.set()
                server.retry(next(iter(server.identities)), stream)
            return [stream.message(index)]  # after the retry: of the old stream, late

        server.on_next = on_next
        rows(teacher, signal)
        assert len(server.streams) == 2 and server.streams[1].worker == "w1"
        assert len(server.of(ScoreRequest)) == 1 and teacher.stats.n_damaged == 0


@pytest.mark.parametrize("signal", ["hidden", "logits"])
@pytest.mark.parametrize("fault", ["gap", "damaged", "row missing", "another worker", "another shape"])
def test_a_stream_with_a_fault_restarts_under_a_new_id(signal: Signal, fault: str) -> None:
    """Fails if a gap in the matrix is filled with other rows, or the restart reuses the old request id."""
    faulty = threading.Event()
    with StreamingServer() as server, client(server) as teacher:

        def on_next(stream: Stream, index: int) -> list[Message]:
            message = stream.message(index)
            if index != 11 or faulty.is_set():
                return [message]
            faulty.set()
            if fault == "gap":
                return []
            if fault == "damaged":
                return [[message[0], bytes(message[1])[:-1] + b"\x01"]]
            if fault == "row missing":
                return [stream.message(index, start=12, stop=13)]
            if fault == "another worker":
                return [stream.message(index, worker="w1")]
            return [stream.message(index, n_cols=stream.rows.shape[1] + 1)]

        server.on_next = on_next
        rows(teacher, signal)
        first, second = (request.request_id for request in server.of(ScoreRequest))
        assert first != second and [cancel.request_id for cancel in server.of(Cancel)] == [first]
        assert teacher.stats.n_damaged == 1


def test_a_stream_that_is_always_damaged_is_an_error() -> None:
    """Fails if a faulty connection is retried forever, because every attempt transfers some rows."""
    with StreamingServer() as server, client(server) as teacher:
        server.on_next = lambda stream, index: [] if index == 5 else [stream.message(index)]
        with pytest.raises(TeacherError):
            rows(teacher, timeout_s=10)
        wait_until(lambda: len(server.of(Cancel)) == 6, 30.0, "the cancellations")


@pytest.mark.parametrize("signal", ["hidden", "logits"])
def test_a_broken_connection_in_the_middle(signal: Signal) -> None:
    """Fails if the client waits for messages lost at the end of a window, where no gap is visible."""
    cut = threading.Event()
    with StreamingServer() as server, client(server) as teacher:

        def on_next(stream: Stream, index: int) -> list[Message]:
            if index >= 20 and not cut.is_set():
                if stream.n_received == 20:
                    threading.Thread(target=lambda: (cut.set(), server.reconnect())).start()
                return []  # the rest of the window is lost
            return [stream.message(index)]

        server.on_next = on_next
        started_s = time.monotonic()
        rows(teacher, signal, timeout_s=30)
        assert time.monotonic() - started_s < 30
        assert len({request.request_id for request in server.of(ScoreRequest)}) == 2


def test_a_stream_that_stops_is_requested_again() -> None:
    """Fails if only broken connections are detected. A resend with the same id would have no effect."""
    with StreamingServer() as server, client(server, request_timeout_s=0.3, outage_budget_s=10.0) as teacher:
        server.on_next = lambda stream, index: (
            [] if index >= 9 and len(server.streams) == 1 else [stream.message(index)]
        )
        rows(teacher)


def test_a_stream_that_never_begins_is_requested_again() -> None:
    """Fails if a lost first window, or a queue longer than request_timeout_s, is an error."""
    with StreamingServer() as server, client(server, request_timeout_s=0.1, outage_budget_s=10.0) as teacher:
        server.on_next = lambda stream, index: [] if len(server.streams) == 1 else [stream.message(index)]
        rows(teacher)
        ids = [request.request_id for request in server.of(ScoreRequest)]
        assert ids[0] == ids[1] == ids[2] != ids[3], "the first resends must keep the position in the queue"


def test_an_expired_stream_starts_again() -> None:
    """Fails if a stream that the server dropped at its deadline is lost."""
    expired = threading.Event()
    with StreamingServer() as server, client(server) as teacher:

        def on_next(stream: Stream, index: int) -> list[Message]:
            if index != 4 or expired.is_set():
                return [stream.message(index)]
            expired.set()
            return server.expire(stream)

        server.on_next = on_next
        rows(teacher, "logits")
        assert len(server.streams) == 2


def test_a_cancelled_stream_ends_at_the_server() -> None:
    """Fails if the teacher continues to compute logits that no one waits for."""
    with StreamingServer() as server, client(server) as teacher:
        server.on_next = lambda stream, index: [stream.message(index)] if index < 5 else []
        future = teacher.submit([rollout()], ["logits"])
        wait_until(lambda: server.of(Received), 30.0, "the first rows")
        assert future.cancel()
        wait_until(lambda: server.of(Cancel), 30.0, "the cancellation")
        server.on_next = lambda stream, index: [stream.message(index)]
        rows(teacher)


def test_logits_that_are_not_shifted_are_refused() -> None:
    """Fails if logits with a maximum other than 0 are accepted."""
    with StreamingServer() as server, client(server) as teacher:

        def on_next(stream: Stream, index: int) -> list[Message]:
            stream.rows = stream.rows + np.float32(1)
            return [stream.message(index)]

        server.on_next = on_next
        with pytest.raises(TeacherError, match="prompt 0, sample 0.*'w0'.*logit"):
            rows(teacher, "logits")
        wait_until(lambda: server.of(Cancel), 30.0, "the cancellation")


def test_an_outage_in_the_middle_of_a_stream() -> None:
    """Fails if a stream waits forever for a dead server."""
    with StreamingServer() as server, client(server, request_timeout_s=0.3, outage_budget_s=0.6) as teacher:
        server.on_next = lambda stream, index: [stream.message(index)] if not server.streams[1:] and index < 2 else []
        with pytest.raises(TeacherUnavailable):
            rows(teacher, "logits")


def test_rows_of_another_wire_dtype_are_refused() -> None:
    """Fails if a worker that ignores the wire mode can double the traffic."""
    with (
        StreamingServer() as server,
        client(server, wire="fp16") as teacher,
        pytest.raises(TeacherError),
    ):
        rows(teacher)
