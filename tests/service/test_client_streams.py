"""Streams of matrices: the client gets each row exactly once, also after faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gkd.errors import TeacherError, TeacherUnavailable
from gkd.teacher.client import ZmqTeacher
from gkd.types import Rollout
from teacher_server.wire.protocol import STREAM_WINDOW, Cancel, ErrorReply, HeadRequest, Received, ScoreRequest
from tests.service.harness import connect, random_rollouts, wait_until
from tests.service.scripted import N_HIDDEN, N_VOCAB, Message, one
from tests.service.scripted_streams import Stream, StreamingServer, matrix

pytestmark = pytest.mark.service
N_ROWS = 40  # five windows of one row a message


def client(server: StreamingServer, **options: Any) -> ZmqTeacher:
    return connect(server.port, **({"n_vocab": N_VOCAB, "request_timeout_s": 60.0} | options))


def rollout(n_rows: int = N_ROWS) -> Rollout:
    return random_rollouts(1, N_VOCAB, response=(n_rows, n_rows))[0]


def gather(pieces: Iterator[tuple[int, np.ndarray]], n_rows: int = N_ROWS) -> np.ndarray:
    """Return [n_rows, C]. Fails unless the pieces are in order, without gaps or repeated rows."""
    rows: list[np.ndarray] = []
    end = 0
    for start, piece in pieces:
        assert start == end and len(piece)
        end += len(piece)
        rows.append(piece)
    assert end == n_rows
    return np.concatenate(rows)


def test_hidden_states_and_the_head_are_assembled() -> None:
    """Fails if a row is misplaced, or the transfer stops at the end of the window."""
    with StreamingServer(rows_a_message=3) as server, client(server) as teacher:
        hidden = teacher.submit_hidden(rollout()).result(timeout=5)
        head = teacher.lm_head()
    np.testing.assert_array_equal(hidden, matrix("hidden", N_ROWS, N_HIDDEN))
    np.testing.assert_array_equal(head, matrix("head", N_VOCAB, N_HIDDEN))
    assert hidden.dtype == head.dtype == np.float32
    assert len(server.of(HeadRequest)) == 1 and len(server.of(ScoreRequest)) == 1
    assert max(stream.most_ahead for stream in server.streams) <= STREAM_WINDOW


def test_logits_wait_for_the_consumer() -> None:
    """Fails if logits of a slow consumer fill the trainer's memory, or arrive out of order."""
    with StreamingServer() as server, client(server) as teacher:
        pieces = teacher.logits(rollout())
        first = next(pieces)
        wait_until(lambda: server.streams[0].n_sent > STREAM_WINDOW, 5.0, "a full window")  # after the first receipt
        time.sleep(0.2)
        assert server.streams[0].n_sent == STREAM_WINDOW + 1, "one message is read, eight wait"
        rest = gather(iter([first, *pieces]))
        np.testing.assert_array_equal(rest, matrix("logits", N_ROWS, N_VOCAB))
        acks = [received.n_messages for received in server.of(Received)]
    assert acks[:N_ROWS] == list(range(1, len(acks) + 1)), "each piece is acknowledged when it is read"
    assert server.streams[0].most_ahead <= STREAM_WINDOW


def test_many_streams_and_scores_share_one_client() -> None:
    """Fails if streams are mixed up, or one that waits for its consumer blocks the others."""
    with StreamingServer() as server, client(server) as teacher:
        paused = teacher.logits(rollout())
        next(paused)
        futures = [teacher.submit_hidden(rollout(n)) for n in (5, 17, 33)]
        for n, future in zip((5, 17, 33), futures, strict=True):
            np.testing.assert_array_equal(future.result(timeout=5), matrix("hidden", n, N_HIDDEN))
        assert sum(1 for _ in paused) == N_ROWS - 1


@pytest.mark.parametrize("signal", ["hidden", "logits"])
@pytest.mark.parametrize("at", [1, 13, N_ROWS - 1])
def test_another_worker_takes_over_in_the_middle(signal: str, at: int) -> None:
    """Fails if rows are repeated after a retry, or rows of the two workers are mixed up."""
    taken_over = threading.Event()
    with StreamingServer() as server, client(server) as teacher:

        def on_next(stream: Stream, index: int) -> list[Message]:
            if index == at and not taken_over.is_set():
                taken_over.set()
                server.retry(next(iter(server.identities)), stream)
                return [stream.message(index)]  # of the old stream, late
            return [stream.message(index)]

        server.on_next = on_next
        if signal == "hidden":
            got = teacher.submit_hidden(rollout()).result(timeout=5)
        else:
            got = gather(teacher.logits(rollout()))
        np.testing.assert_array_equal(got, matrix(signal, N_ROWS, got.shape[1]))
        assert len(server.streams) == 2 and server.streams[1].worker == "w1"
        assert len(server.of(ScoreRequest)) == 1 and teacher.stats.n_damaged == 0


@pytest.mark.parametrize("signal", ["hidden", "logits"])
@pytest.mark.parametrize("fault", ["gap", "damaged", "row missing", "another worker", "another shape"])
def test_a_stream_with_a_fault_restarts_under_a_new_id(signal: str, fault: str) -> None:
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
        if signal == "hidden":
            got = teacher.submit_hidden(rollout()).result(timeout=5)
        else:
            got = gather(teacher.logits(rollout()))
        np.testing.assert_array_equal(got, matrix(signal, N_ROWS, got.shape[1]))
        first, second = (request.request_id for request in server.of(ScoreRequest))
        assert first != second and [cancel.request_id for cancel in server.of(Cancel)] == [first]
        assert teacher.stats.n_damaged == 1


def test_a_stream_that_is_always_damaged_is_an_error() -> None:
    """Fails if a faulty connection is retried forever, because every attempt transfers some rows."""
    with StreamingServer() as server, client(server) as teacher:
        server.on_next = lambda stream, index: [] if index == 5 else [stream.message(index)]
        with pytest.raises(TeacherError, match="damaged.* 6 "):
            teacher.submit_hidden(rollout()).result(timeout=10)
        wait_until(lambda: len(server.of(Cancel)) == 6, 2.0, "the cancellations")


@pytest.mark.parametrize("signal", ["hidden", "logits"])
def test_a_broken_connection_in_the_middle(signal: str) -> None:
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
        if signal == "hidden":
            got = teacher.submit_hidden(rollout()).result(timeout=10)
        else:
            got = gather(teacher.logits(rollout()))
        np.testing.assert_array_equal(got, matrix(signal, N_ROWS, got.shape[1]))
        assert time.monotonic() - started_s < 5
        assert len({request.request_id for request in server.of(ScoreRequest)}) == 2


def test_a_stream_that_stops_is_requested_again() -> None:
    """Fails if only broken connections are detected. A resend with the same id would have no effect."""
    with StreamingServer() as server, client(server, request_timeout_s=0.3, outage_budget_s=10.0) as teacher:
        server.on_next = lambda stream, index: (
            [] if index >= 9 and len(server.streams) == 1 else [stream.message(index)]
        )
        got = teacher.submit_hidden(rollout()).result(timeout=5)
        np.testing.assert_array_equal(got, matrix("hidden", N_ROWS, N_HIDDEN))


def test_a_stream_that_never_begins_is_requested_again() -> None:
    """Fails if a lost first window, or a queue longer than request_timeout_s, is an error."""
    with StreamingServer() as server, client(server, request_timeout_s=0.1, outage_budget_s=10.0) as teacher:
        server.on_next = lambda stream, index: [] if len(server.streams) == 1 else [stream.message(index)]
        teacher.submit_hidden(rollout()).result(timeout=5)
        ids = [request.request_id for request in server.of(ScoreRequest)]
        assert ids[0] == ids[1] == ids[2] != ids[3], "the first resends must keep the position in the queue"


def test_an_expired_stream_continues_at_its_position() -> None:
    """Fails if a consumer slower than the deadline loses its stream, or gets repeated rows."""
    with StreamingServer() as server, client(server) as teacher:
        pieces = teacher.logits(rollout())
        first = [next(pieces) for _ in range(4)]
        identity, stream = next(iter(server.identities)), server.streams[0]
        late = ErrorReply(request_id=stream.request_id, code="deadline", text="scripted")

        def expire() -> None:
            server._by_request.pop(stream.request_id)
            server.send(identity, one(late))

        server.do(expire)
        got = gather(iter([*first, *pieces]))
        np.testing.assert_array_equal(got, matrix("logits", N_ROWS, N_VOCAB))
        assert len(server.streams) == 2


def test_a_pause_of_the_consumer_is_not_an_outage() -> None:
    """Fails if a pause of the trainer counts as a stall of the server, or lets the request expire."""
    with StreamingServer() as server, client(server, request_timeout_s=0.3, outage_budget_s=0.6) as teacher:
        pieces = teacher.logits(rollout())
        first = next(pieces)
        time.sleep(1.1)
        assert len(server.of(ScoreRequest)) > 2, "the deadline must be renewed"
        gather(iter([first, *pieces]))
        assert len(server.streams) == 1


def test_closing_a_stream_early_cancels_it() -> None:
    """Fails if the teacher continues to compute logits of a closed stream."""
    with StreamingServer() as server, client(server) as teacher:
        pieces = teacher.logits(rollout())
        for _ in range(5):
            next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        wait_until(lambda: server.of(Cancel), 2.0, "the cancellation")
        assert server.streams[0].n_sent <= 5 + STREAM_WINDOW
        future = teacher.submit_hidden(rollout())
        assert future.result(timeout=5).shape == (N_ROWS, N_HIDDEN)


def test_a_server_that_ignores_the_window_is_refused() -> None:
    """Fails if a server that exceeds the window can fill the trainer's memory."""
    with StreamingServer() as server, client(server) as teacher:
        server.on_next = lambda stream, index: [stream.message(i) for i in range(N_ROWS)] if index == 0 else []
        pieces = teacher.logits(rollout())
        next(pieces)
        time.sleep(0.3)
        with pytest.raises(TeacherError, match=f" {STREAM_WINDOW} messages"):
            list(pieces)


def test_logits_that_are_not_shifted_are_refused() -> None:
    """Fails if logits with a maximum other than 0 are accepted."""
    with StreamingServer() as server, client(server) as teacher:

        def on_next(stream: Stream, index: int) -> list[Message]:
            stream.rows = stream.rows + np.float32(1)
            return [stream.message(index)]

        server.on_next = on_next
        with pytest.raises(TeacherError, match="prompt 0, sample 0.*'w0'.*logit"):
            gather(teacher.logits(rollout()))
        wait_until(lambda: server.of(Cancel), 2.0, "the cancellation")


def test_an_outage_in_the_middle_of_a_stream_reaches_its_consumer() -> None:
    """Fails if the consumer of a stream waits forever for a dead server."""
    with StreamingServer() as server, client(server, request_timeout_s=0.3, outage_budget_s=0.6) as teacher:
        server.on_next = lambda stream, index: [stream.message(index)] if index < 2 else []
        pieces = teacher.logits(rollout())
        next(pieces)
        server.on_next = lambda stream, index: []
        with pytest.raises(TeacherUnavailable, match=" 1 sequences"):
            list(pieces)


def test_close_ends_the_consumer_of_a_stream() -> None:
    """Fails if the consumer of a stream waits after the client is closed."""
    with StreamingServer() as server:
        teacher = client(server)
        server.on_next = lambda stream, index: [stream.message(index)] if index < 2 else []
        pieces = teacher.logits(rollout())
        next(pieces)
        threading.Timer(0.2, teacher.close).start()
        with pytest.raises(TeacherError, match=" 1 "):
            list(pieces)


def test_rows_of_another_wire_dtype_are_refused() -> None:
    """Fails if a worker that ignores the wire mode can double the traffic."""
    with (
        StreamingServer() as server,
        client(server, wire="fp16") as teacher,
        pytest.raises(TeacherError, match="damaged .*float32"),
    ):
        teacher.submit_hidden(rollout()).result(timeout=5)
