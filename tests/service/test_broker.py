"""The real broker between scripted peers: who is believed, who is refused, who gets an answer.

Client and workers here are bare sockets, so that each test sends exactly the bytes it is about.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from teacher_server.broker.broker import Broker
from teacher_server.wire.payload import unpack_topk
from teacher_server.wire.protocol import (
    ID_BYTES,
    NO_REQUEST,
    Cancel,
    DrainReply,
    DrainRequest,
    ErrorReply,
    HeadRequest,
    InfoReply,
    InfoRequest,
    Ping,
    Pong,
    Received,
    RowsReply,
    ScoreReply,
    ScoreRequest,
    StatusReply,
    StatusRequest,
    as_frame,
    checksum,
    replies,
    requests,
    token_digest,
)
from teacher_server.wire.status import decode_status
from teacher_server.wire.worker_protocol import (
    Assignment,
    Dismiss,
    Done,
    JobCancel,
    JobReceived,
    Part,
    WorkerHello,
    from_worker,
    to_worker,
)
from tests.service.messages import H, V, make_hello, make_reply, make_request, make_scores, make_tokens

pytestmark = pytest.mark.service
TIMEOUT_MS = 5000


class Peer:
    """One DEALER."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, os.urandom(ID_BYTES))
        self.socket.connect(endpoint)

    def frames(self) -> list[bytes]:
        assert self.socket.poll(TIMEOUT_MS), "no message"
        return self.socket.recv_multipart()

    def hears_nothing(self, for_ms: int = 200) -> bool:
        return not self.socket.poll(for_ms)


class Client(Peer):
    def ask(self, request: Any, *frames: Any) -> None:
        self.socket.send_multipart([requests.encode(request), *frames])

    def score(self, tokens: np.ndarray | None = None, **changes: Any) -> ScoreRequest:
        tokens = make_tokens() if tokens is None else tokens
        request = make_request(tokens, **changes)
        self.ask(request, as_frame(tokens))
        return request

    def hear(self) -> tuple[Any, list[bytes]]:
        header, *frames = self.frames()
        return replies.decode(header), frames

    def status(self) -> Any:
        self.ask(StatusRequest(request_id=bytes(ID_BYTES)))
        header, frames = self.hear()
        assert isinstance(header, StatusReply)
        return decode_status(header, list(frames))


class ScriptedWorker(Peer):
    def __init__(self, context: zmq.Context[Any], endpoint: str, **changes: Any) -> None:
        super().__init__(context, endpoint)
        self.said = make_hello(**changes)
        self.hello()

    def hello(self, **changes: Any) -> None:
        fields = {name: getattr(self.said, name) for name in self.said.__struct_fields__}
        self.socket.send(from_worker.encode(WorkerHello(**(fields | changes))))

    def hear(self) -> tuple[Any, list[bytes]]:
        header, *frames = self.frames()
        return to_worker.decode(header), frames

    def job(self) -> tuple[bytes, ScoreRequest, np.ndarray]:
        message, (header, *frames) = self.hear()
        assert isinstance(message, Assignment)
        self.stream_id = message.stream_id
        request = requests.decode(header)
        tokens = np.frombuffer(frames[0], np.int32) if frames else np.zeros(0, np.int32)
        return message.job_id, request, tokens  # type: ignore[return-value]

    def answer(self, job_id: bytes, header: Any, frames: Any = (), *, final: bool = True) -> None:
        message = Done(job_id=job_id) if final else Part(job_id=job_id)
        self.socket.send_multipart([from_worker.encode(message), replies.encode(header), *frames])


class Rig:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.endpoint = f"ipc://{folder}/workers-{os.urandom(3).hex()}"
        self.broker = Broker("127.0.0.1", 0, self.endpoint, **settings)
        self.broker.start()
        self._context = zmq.Context()
        _OPEN.append(self)

    def client(self) -> Client:
        return Client(self._context, f"tcp://127.0.0.1:{self.broker.port}")

    def worker(self, **changes: Any) -> ScriptedWorker:
        """Joined when this returns, or refused."""
        worker = ScriptedWorker(self._context, self.endpoint, **changes)
        self.event("ready", "refused")
        return worker

    def event(self, *kinds: str) -> tuple[str, str, str]:
        """The next event of one of these kinds; others are dropped."""
        while True:
            event = self.broker.events.get(timeout=TIMEOUT_MS / 1000)
            if event.kind in kinds:
                return event

    def close(self) -> None:
        was_alive = self.broker.alive
        self.release()
        assert was_alive, "the broker died"

    def release(self) -> None:
        _OPEN.remove(self)
        self.broker.stop()
        self._context.destroy(linger=0)


_OPEN: list[Rig] = []


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    """What a failed test leaves would block whichever test the garbage collector finds it in."""
    yield
    for rig in list(_OPEN):
        rig.release()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_a_request_comes_back_answered(rig: Rig) -> None:
    """Would break if frames were lost, reordered or copied wrongly on the way through."""
    worker, client = rig.worker(), rig.client()
    asked = client.score()
    job_id, request, tokens = worker.job()
    assert request == asked
    scores = make_scores(request.n_response, request.k)
    worker.answer(job_id, *make_reply(request, tokens, scores))
    header, frames = client.hear()
    assert isinstance(header, ScoreReply) and header.request_id == asked.request_id
    np.testing.assert_array_equal(unpack_topk(header, list(frames)).ids, scores.ids)
    (status,) = client.status().workers
    assert (status.n_done, status.n_tokens, status.n_in_flight) == (1, 40, 0)
    assert (status.queue_s, status.compute_s) == (0.25, 1.5)


def damage(**changes: Any) -> Callable[[ScoreRequest, np.ndarray], tuple[Any, Any]]:
    return lambda request, tokens: make_reply(request, tokens, **changes)


def flipped(request: ScoreRequest, tokens: np.ndarray) -> tuple[Any, Any]:
    reply, frames = make_reply(request, tokens)
    raw = bytearray(frames[0])
    raw[5] ^= 1
    return reply, [bytes(raw), *frames[1:]]


def nan(request: ScoreRequest, tokens: np.ndarray) -> tuple[Any, Any]:
    scores = make_scores(request.n_response, request.k)
    scores.logprobs[2, 1] = np.nan
    return make_reply(request, tokens, scores)


def above_one(request: ScoreRequest, tokens: np.ndarray) -> tuple[Any, Any]:
    scores = make_scores(request.n_response, request.k)
    scores.logprobs[2, 0] = 5.0
    return make_reply(request, tokens, scores)


def negative_tail(request: ScoreRequest, tokens: np.ndarray) -> tuple[Any, Any]:
    scores = make_scores(request.n_response, request.k)
    scores.tail[2] = -3.0
    return make_reply(request, tokens, scores)


def past_the_vocabulary(request: ScoreRequest, tokens: np.ndarray) -> tuple[Any, Any]:
    scores = make_scores(request.n_response, request.k)
    scores.ids[2, 1] = V
    return make_reply(request, tokens, scores)


def short(request: ScoreRequest, tokens: np.ndarray) -> tuple[Any, Any]:
    reply, frames = make_reply(request, tokens)
    return reply, frames[:-1]


def about_other_tokens(request: ScoreRequest, tokens: np.ndarray) -> tuple[Any, Any]:
    return make_reply(request, tokens[::-1].copy())


def unasked_rows(request: ScoreRequest, tokens: np.ndarray) -> tuple[Any, Any]:
    rows = np.zeros((request.n_response, V), np.float32)
    return rows_message(request, token_digest(tokens), rows, 0, len(rows), os.urandom(16), 0)


@pytest.mark.parametrize(
    "bad",
    [
        nan,
        flipped,
        above_one,
        negative_tail,
        past_the_vocabulary,
        short,
        about_other_tokens,
        unasked_rows,
        damage(request_id=bytes(16)),
        damage(model_fingerprint="another"),
        damage(worker="somebody"),
        damage(k=5, n_entries=150),
        damage(wire="fp32"),
        lambda request, tokens: (ErrorReply(request_id=request.request_id, code="busy", text=""), ()),
    ],
)
def test_bad_data_never_arrives_and_its_worker_is_excluded(rig: Rig, bad: Callable[..., Any]) -> None:
    """Would break if a client had to find out, or a worker that lies once went on to be asked."""
    sick, client = rig.worker(name="sick", pid=1), rig.client()
    asked = client.score()
    job_id, request, tokens = sick.job()
    sick.answer(job_id, *bad(request, tokens))
    assert rig.event("excluded")[1] == "sick"
    message, _ = sick.hear()
    assert isinstance(message, Dismiss) and message.why
    well = rig.worker(name="w", pid=2)
    job_id, request, tokens = well.job()
    well.answer(job_id, *make_reply(request, tokens))
    header, _ = client.hear()
    assert isinstance(header, ScoreReply) and header.request_id == asked.request_id and header.worker == "w"
    assert list(client.status().excluded) == ["sick"]
    sick.hello()
    message, _ = sick.hear()
    assert isinstance(message, Dismiss), "the same process does not come back"


def test_garbage_from_a_worker_excludes_it(rig: Rig) -> None:
    """Would break if a worker whose memory or build is broken stayed in service."""
    sick = rig.worker(name="sick")
    sick.socket.send(b"\x00garbage")
    assert rig.event("excluded")[1] == "sick"


def test_garbage_from_strangers_changes_nothing(rig: Rig) -> None:
    """Would break if anyone who finds the port could stop the server, or fill its memory."""
    client, stranger = rig.client(), rig.client()
    for frames in ([b""], [b"GET / HTTP/1.1"], [b"", b"", b""], [os.urandom(100)] * 300):
        stranger.socket.send_multipart(frames)
        header, _ = stranger.hear()
        assert isinstance(header, ErrorReply) and (header.code, header.request_id) == ("damaged", NO_REQUEST)
    asked = make_request(checksum=5)
    for frames in ([], [b"123"], [as_frame(make_tokens())] * 2):
        client.ask(asked, *frames)
        header, _ = client.hear()
        assert isinstance(header, ErrorReply) and (header.code, header.request_id) == ("damaged", asked.request_id)
    stranger.socket.send(bytes((4 << 20) + 1))  # over the frame limit: the connection is cut
    client.ask(Ping())
    assert isinstance(client.hear()[0], Pong)


def rows_message(
    request: Any, digest: bytes, rows: np.ndarray, start: int, stop: int, stream_id: bytes, index: int, **changes: Any
) -> tuple[RowsReply, list[memoryview]]:
    frame = as_frame(np.ascontiguousarray(rows[start:stop]))
    fields = {
        "request_id": request.request_id,
        "token_digest": digest,
        "model_fingerprint": "f",
        "worker": "w",
        "stream_id": stream_id,
        "signal": getattr(request, "signal", "head"),
        "index": index,
        "start": start,
        "stop": stop,
        "n_rows": len(rows),
        "n_cols": rows.shape[1],
        "dtype": "float32",
        "checksums": [checksum(frame)],
        "queue_s": 0.0,
        "compute_s": 0.0,
    }
    if fields["signal"] == "topk":
        fields["signal"] = "logits"
    return RowsReply(**(fields | changes)), [frame]


def test_a_stream_passes_in_order_and_its_receipts_go_back(rig: Rig) -> None:
    """Would break if parts overtook each other, or the worker never learned that the client takes them."""
    worker, client = rig.worker(), rig.client()
    asked = client.score(signal="logits")
    job_id, request, tokens = worker.job()
    rows, stream_id = np.random.default_rng(0).normal(size=(30, V)).astype(np.float32), worker.stream_id
    for index, start in enumerate((0, 10, 20)):
        message = rows_message(request, token_digest(tokens), rows, start, start + 10, stream_id, index)
        worker.answer(job_id, *message, final=start == 20)
        if index == 0:
            client.ask(Received(request_id=asked.request_id, stream_id=stream_id, n_messages=1))
            client.ask(Received(request_id=asked.request_id, stream_id=bytes(16), n_messages=9))
            receipt, _ = worker.hear()
            assert isinstance(receipt, JobReceived) and (receipt.job_id, receipt.n_messages) == (job_id, 1)
    got = [client.hear() for _ in range(3)]
    assert [header.index for header, _ in got] == [0, 1, 2]
    np.testing.assert_array_equal(
        np.concatenate([np.frombuffer(f[0], np.float32).reshape(10, V) for _, f in got]), rows
    )
    assert worker.hears_nothing(), "a receipt of another stream is not passed on"
    client.ask(HeadRequest(request_id=os.urandom(16), wire="fp32", deadline_s=5.0))
    job_id, head_request, _ = worker.job()
    head = np.ones((V, H), np.float32)
    worker.answer(job_id, *rows_message(head_request, bytes(16), head, 0, V, worker.stream_id, 0, signal="head"))
    assert client.hear()[0].signal == "head"


@pytest.mark.parametrize(
    "second",
    [{"index": 2}, {"start": 11}, {"start": 9}, {"n_cols": V + 1}, {"signal": "hidden"}],
    ids=str,
)
def test_a_stream_with_a_hole_excludes_its_worker(rig: Rig, second: dict[str, Any]) -> None:
    """Would break if a row could be missing, doubled, or of another attempt, inside a stream that looks complete."""
    worker, client = rig.worker(), rig.client()
    client.score(signal="logits")
    job_id, request, tokens = worker.job()
    rows, stream_id = np.zeros((30, V), np.float32), worker.stream_id
    digest = token_digest(tokens)
    worker.answer(job_id, *rows_message(request, digest, rows, 0, 10, stream_id, 0), final=False)
    header, frames = rows_message(request, digest, rows, 10, 30, stream_id, 1)
    for name, value in second.items():
        setattr(header, name, value)
    worker.answer(job_id, header, frames)
    assert rig.event("excluded")[1] == "w"


def test_the_rest_of_a_lost_attempt_is_no_fault(tmp_path: Path) -> None:
    """Would break if an honest worker whose connection blinks during a stream were excluded for good."""
    rig = Rig(tmp_path, worker_timeout_s=0.5)
    worker, client = rig.worker(), rig.client()
    client.score(signal="logits")
    job_id, request, tokens = worker.job()
    old_id, rows, digest = worker.stream_id, np.zeros((30, V), np.float32), token_digest(tokens)
    worker.answer(job_id, *rows_message(request, digest, rows, 0, 10, old_id, 0), final=False)
    client.hear()
    time.sleep(0.8)  # silent, hence lost
    worker.hello()
    assert worker.job()[0] == job_id and worker.stream_id != old_id
    worker.answer(job_id, *rows_message(request, digest, rows, 10, 30, old_id, 1))
    assert client.hears_nothing(), "old news"
    worker.answer(job_id, *rows_message(request, digest, rows, 0, 30, worker.stream_id, 0))
    assert client.hear()[0].stop == 30 and client.status().excluded == {}
    rig.close()


def test_a_workers_long_words_do_not_end_the_broker(rig: Rig) -> None:
    """Would break if what a worker says of itself could make a message that the codec refuses."""
    rig.worker(name="w", model_path="/" + "m" * 4090)
    other = rig.worker(name="v", pid=2, model_fingerprint="g")
    assert len(other.hear()[0].why) <= 1000
    client = rig.client()
    client.ask(Ping())
    assert isinstance(client.hear()[0], Pong)


def test_work_of_a_lost_worker_goes_elsewhere(tmp_path: Path) -> None:
    """Would break if a silent worker kept its requests, or its late answer reached the client as a second one."""
    rig = Rig(tmp_path, worker_timeout_s=0.5)
    slow, client = rig.worker(name="slow", pid=1), rig.client()
    asked = client.score()
    job_id, request, tokens = slow.job()
    time.sleep(0.8)
    quick = rig.worker(name="w", pid=2)
    again, request, _ = quick.job()
    assert again == job_id
    slow.hello()  # back, and first with the answer
    slow.answer(job_id, *make_reply(request, tokens, worker="slow"))
    assert client.hear()[0].worker == "slow"
    quick.answer(job_id, *make_reply(request, tokens))
    assert client.hears_nothing()
    assert asked.request_id == request.request_id and client.status().n_retried == 1
    rig.close()


def test_a_reconnected_worker_gets_its_work_again(rig: Rig) -> None:
    """Would break if what was on its way over a broken connection waited for its deadline."""
    first, client = rig.worker(), rig.client()
    client.score()
    job_id, _, _ = first.job()
    second = rig.worker()  # same process, new identity
    again, request, tokens = second.job()
    assert again == job_id
    second.answer(again, *make_reply(request, tokens))
    assert isinstance(client.hear()[0], ScoreReply)


@pytest.mark.parametrize(
    "changes",
    [{"model_fingerprint": "g"}, {"dtype": "bfloat16"}, {"tokenizer_fingerprint": "u"}, {"name": "w"}],
    ids=str,
)
def test_a_worker_that_does_not_fit_is_refused(rig: Rig, changes: dict[str, Any]) -> None:
    """Would break if two answers to one request could come from two models, or two workers had one name."""
    rig.worker()
    other = rig.worker(**({"name": "v", "pid": 2} | changes))
    message, _ = other.hear()
    assert isinstance(message, Dismiss)
    expected = "another worker is called w" if "name" in changes else f"is not the {getattr(make_hello(), *changes)}"
    assert expected in message.why


def test_deadlines_and_cancels_reach_the_worker(rig: Rig) -> None:
    """Would break if a teacher went on computing for a trainer that has given up."""
    worker, client = rig.worker(), rig.client()
    asked = client.score(deadline_s=0.3)
    job_id, _, _ = worker.job()
    header, _ = client.hear()
    assert isinstance(header, ErrorReply) and (header.code, header.request_id) == ("deadline", asked.request_id)
    assert worker.hear()[0] == JobCancel(job_id=job_id)
    asked = client.score()
    job_id, request, tokens = worker.job()
    client.ask(Cancel(request_id=asked.request_id))
    assert worker.hear()[0] == JobCancel(job_id=job_id)
    worker.answer(job_id, *make_reply(request, tokens))
    assert client.hears_nothing()


def test_a_full_queue_answers_busy(tmp_path: Path) -> None:
    """Would break if impatient clients could fill the server's memory, or were left without a word."""
    rig = Rig(tmp_path, max_queue_bytes=5000)
    client = rig.client()
    asked = [client.score() for _ in range(10)]
    busy = {client.hear()[0].request_id for _ in range(7)}
    assert busy == {request.request_id for request in asked[3:]} and client.hears_nothing()
    rig.close()


def test_names_of_teachers(tmp_path: Path) -> None:
    """Would break if a request without a name, or with a wrong one, were scored by whichever teacher is there."""
    rig = Rig(tmp_path, teachers={"math": "f", "code": ""})
    client = rig.client()

    def info(name: str) -> Any:
        client.ask(InfoRequest(request_id=bytes(16), teacher=name))
        return client.hear()[0]

    assert info("math").code == "busy", "its worker is still to come"
    math = rig.worker(name="wm", pid=1, teacher="math")
    code = rig.worker(name="wc", pid=2, teacher="code", model_fingerprint="g", vocab_size=99)
    assert (info("math").model_fingerprint, info("code").vocab_size) == ("f", 99)
    assert isinstance(info("math"), InfoReply)
    for name, words in (("", "several teachers, name one of: code, math"), ("art", "no teacher 'art' here")):
        assert info(name).code == "bad_request" and words in info(name).text
        client.score(teacher=name)
        assert words in client.hear()[0].text
    stranger = rig.worker(name="wx", pid=3, teacher="maths")
    assert "no teacher 'maths' here, but: code, math" in stranger.hear()[0].why
    client.score(teacher="code")
    assert code.job()[1].teacher == "code" and math.hears_nothing()
    rig.close()


def test_draining_finishes_what_there_is(tmp_path: Path) -> None:
    """Would break if a drain dropped work, took new work, or never said that it was over."""
    rig = Rig(tmp_path)
    worker, client = rig.worker(), rig.client()
    asked = client.score()
    client.ask(DrainRequest(request_id=bytes(16)))
    reply, _ = client.hear()
    assert isinstance(reply, DrainReply) and reply.n_left == 1
    client.score()
    refused, _ = client.hear()
    assert refused.code == "draining" and refused.retry_after_s > 0
    client.ask(asked, as_frame(make_tokens()))  # a resend of what is being done is no new work
    client.ask(Ping())
    assert isinstance(client.hear()[0], Pong), "it has come before the worker's answer, which takes another way"
    job_id, request, tokens = worker.job()
    worker.answer(job_id, *make_reply(request, tokens))
    assert isinstance(client.hear()[0], ScoreReply)
    rig.event("drained")
    client.ask(Ping())
    assert client.hear()[0].draining
    rig.close()


def test_a_drained_worker_finishes_and_goes(rig: Rig) -> None:
    """Would break if taking one host out of service cost requests, or the host was never let go."""
    worker, client = rig.worker(), rig.client()
    client.score()
    job_id, request, tokens = worker.job()

    def drain(name: str) -> Any:
        client.ask(DrainRequest(request_id=bytes(16), worker=name))
        return client.hear()[0]

    assert drain("w").n_left == 1
    client.score()
    assert worker.hears_nothing(), "no new work"
    worker.answer(job_id, *make_reply(request, tokens))
    assert isinstance(client.hear()[0], ScoreReply)
    assert worker.hear()[0] == Dismiss()
    assert rig.event("dismissed")[1] == "w"
    assert drain("w").n_left == 0, "asking again is harmless"
    assert drain("nobody").code == "bad_request"
    assert client.status().n_queued == 1, "the second request waits for another worker"


def test_a_worker_of_another_model_does_not_join_even_if_it_is_first(tmp_path: Path) -> None:
    """Would break if one left over from the last model decided what a restarted server serves."""
    rig = Rig(tmp_path, teachers={"": "f"})
    stale = rig.worker(model_fingerprint="old")
    assert "model_fingerprint old is not the f of teacher" in stale.hear()[0].why
    assert rig.client().status().workers == []
    rig.close()


def test_a_drained_worker_stays_drained_after_a_reconnect(rig: Rig) -> None:
    """Would break if a worker got work again while its operator pulls the host."""
    first, client = rig.worker(), rig.client()
    client.score()
    first.job()
    client.ask(DrainRequest(request_id=bytes(16), worker="w"))
    client.hear()
    second = rig.worker()  # the same process over a new connection, whose hello knows nothing of the drain
    assert second.hear()[0] == Dismiss()
    assert client.status().n_queued == 1


def test_guests_do_not_bear_the_servers_names(tmp_path: Path) -> None:
    """Would break if whoever may join could be taken for a worker of the server, whose refusal ends it."""
    rig = Rig(tmp_path, worker_port=0)
    guest = ScriptedWorker(rig._context, f"tcp://127.0.0.1:{rig.broker.worker_port}", name="w0.0")
    assert "names its own workers so" in guest.hear()[0].why
    assert rig.broker.events.empty()
    rig.close()


def test_a_dead_broker_thread_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break if a bug in the broker left a server that only SIGKILL ends."""
    rig = Rig(tmp_path)
    monkeypatch.setattr(rig.broker, "_tick", lambda now_s: 1 / 0)
    rig.client().ask(Ping())
    rig.broker._thread.join(timeout=5)
    assert not rig.broker.alive
    rig.broker.worker_died("w0.0")
    rig.broker.stop()
    rig._context.destroy(linger=0)


def test_an_engine_error_is_told_when_nobody_else_can(rig: Rig) -> None:
    """Would break if a client waited for its time-out where the server knew the answer."""
    worker, client = rig.worker(), rig.client()
    asked = client.score()
    job_id, request, _ = worker.job()
    worker.answer(job_id, ErrorReply(request_id=request.request_id, code="engine", text="out of memory"))
    header, _ = client.hear()
    assert (header.code, header.text, header.request_id) == ("engine", "out of memory", asked.request_id)
    other = rig.worker(name="v", pid=2)
    client.score()
    first, second = (worker, other) if worker.socket.poll(1000) else (other, worker)
    job_id, request, tokens = first.job()
    first.answer(job_id, ErrorReply(request_id=request.request_id, code="engine", text="bad card"))
    job_id, request, tokens = second.job()
    second.answer(job_id, *make_reply(request, tokens, worker="v" if second is other else "w"))
    assert isinstance(client.hear()[0], ScoreReply)
