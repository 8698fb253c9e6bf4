"""The real broker between scripted clients and workers: checks, retries, exclusion, draining.

Clients and workers are bare sockets, so each test controls the exact bytes on the wire.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from teacher_server.broker.broker import Broker
from teacher_server.wire.payload import unpack_topk
from teacher_server.wire.protocol import (
    NO_REQUEST,
    Cancel,
    DrainReply,
    DrainRequest,
    ErrorReply,
    HeadRequest,
    InfoRequest,
    Ping,
    Pong,
    Received,
    ScoreReply,
    ScoreRequest,
    as_frame,
    token_digest,
)
from teacher_server.wire.worker_protocol import Dismiss, JobCancel, JobReceived
from tests.processes import wait_until
from tests.service.broker_rig import Rig, ScriptedWorker
from tests.service.messages import H, V, make_hello, make_reply, make_request, make_scores, make_tokens, rows_message

pytestmark = pytest.mark.service


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Start a broker, with the settings that a test gives as the parameter."""
    rig = Rig(tmp_path, **getattr(request, "param", {}))
    yield rig
    rig.close()


def test_a_request_is_completed(rig: Rig) -> None:
    """Fails if frames are lost, reordered or changed between client and worker."""
    worker, client = rig.worker(), rig.client()
    sent = client.score()
    job_id, request, tokens = worker.job()
    assert request == sent
    scores = make_scores(request.n_response, request.k)
    worker.reply(job_id, *make_reply(request, tokens, scores))
    header, frames = client.receive()
    assert isinstance(header, ScoreReply) and header.request_id == sent.request_id
    np.testing.assert_array_equal(unpack_topk(header, list(frames)).ids, scores.ids)
    (status,) = client.status().workers
    assert (status.n_done, status.n_tokens, status.n_in_flight) == (1, 40, 0)
    assert (status.queue_s, status.compute_s) == (0.25, 1.5)


def changed(**changes: Any) -> Callable[[ScoreRequest, np.ndarray], tuple[Any, Any]]:
    return lambda request, tokens: make_reply(request, tokens, **changes)


def with_value(field: str, at: Any, value: float) -> Callable[[ScoreRequest, np.ndarray], tuple[Any, Any]]:
    def bad(request: ScoreRequest, tokens: np.ndarray) -> tuple[Any, Any]:
        scores = make_scores(request.n_response, request.k)
        getattr(scores, field)[at] = value
        return make_reply(request, tokens, scores)

    return bad


def flipped(request: ScoreRequest, tokens: np.ndarray) -> tuple[Any, Any]:
    reply, frames = make_reply(request, tokens)
    raw = bytearray(frames[0])
    raw[5] ^= 1
    return reply, [bytes(raw), *frames[1:]]


def short(request: ScoreRequest, tokens: np.ndarray) -> tuple[Any, Any]:
    reply, frames = make_reply(request, tokens)
    return reply, frames[:-1]


def for_other_tokens(request: ScoreRequest, tokens: np.ndarray) -> tuple[Any, Any]:
    return make_reply(request, tokens[::-1].copy())


def rows_instead_of_scores(request: ScoreRequest, tokens: np.ndarray) -> tuple[Any, Any]:
    rows = np.zeros((request.n_response, V), np.float32)
    return rows_message(request, token_digest(tokens), rows, 0, len(rows), os.urandom(16), 0)


@pytest.mark.parametrize(
    "bad",
    [
        with_value("logprobs", (2, 1), np.nan),
        with_value("logprobs", (2, 0), 5.0),
        with_value("tail", 2, -3.0),
        with_value("ids", (2, 1), V),
        flipped,
        short,
        for_other_tokens,
        rows_instead_of_scores,
        changed(request_id=bytes(16)),
        changed(model_fingerprint="another"),
        changed(worker="other"),
        changed(k=5, n_entries=150),
        changed(wire="fp32"),
        lambda request, tokens: (ErrorReply(request_id=request.request_id, code="busy", text=""), ()),
    ],
)
def test_a_worker_that_sends_bad_data_is_excluded(rig: Rig, bad: Callable[..., Any]) -> None:
    """Fails if bad data reaches a client, or a worker that sent bad data gets more requests."""
    # Its name is that of `make_reply`. Otherwise the name alone would make each reply invalid.
    faulty, client = rig.worker(name="w", pid=1), rig.client()
    sent = client.score()
    job_id, request, tokens = faulty.job()
    faulty.reply(job_id, *bad(request, tokens))
    assert rig.event("excluded")[1] == "w"
    message, _ = faulty.receive()
    assert isinstance(message, Dismiss) and message.why
    healthy = rig.worker(name="healthy", pid=2)
    job_id, request, tokens = healthy.job()
    healthy.reply(job_id, *make_reply(request, tokens, worker="healthy"))
    header, _ = client.receive()
    assert isinstance(header, ScoreReply) and header.request_id == sent.request_id and header.worker == "healthy"
    assert list(client.status().excluded) == ["w"]
    faulty.hello()
    message, _ = faulty.receive()
    assert isinstance(message, Dismiss), "the same process cannot join again"


def test_the_responses_to_a_prompt_go_to_one_worker(rig: Rig) -> None:
    """Fails if the broker does not read the prompts of requests, so that each worker computes each prompt."""
    workers = [rig.worker(name=f"w{pid}", pid=pid, prefix_block=16, credit_tokens=1000) for pid in (1, 2)]
    client = rig.client()
    for i in range(8):
        tokens = np.concatenate([make_tokens(40, seed=i % 2), make_tokens(10, seed=100 + i)])
        client.score(tokens, prompt_length=40)
    prompts = [{worker.job()[2][:40].tobytes() for _ in range(4)} for worker in workers]
    assert list(map(len, prompts)) == [1, 1] and prompts[0] != prompts[1]


def test_garbage_from_a_worker_excludes_it(rig: Rig) -> None:
    """Fails if a worker that sends unreadable messages stays in service."""
    faulty = rig.worker(name="faulty")
    faulty.socket.send(b"\x00garbage")
    assert rig.event("excluded")[1] == "faulty"


def test_garbage_from_clients_is_refused(rig: Rig) -> None:
    """Fails if garbage on the client port stops the server or fills its memory."""
    client, other = rig.client(), rig.client()
    for frames in ([b""], [b"GET / HTTP/1.1"], [b"", b"", b""], [os.urandom(100)] * 300):
        other.socket.send_multipart(frames)
        header, _ = other.receive()
        assert isinstance(header, ErrorReply) and (header.code, header.request_id) == ("damaged", NO_REQUEST)
    sent = make_request(checksum=5)
    for frames in ([], [b"123"], [as_frame(make_tokens())] * 2):
        client.send(sent, *frames)
        header, _ = client.receive()
        assert isinstance(header, ErrorReply) and (header.code, header.request_id) == ("damaged", sent.request_id)
    other.socket.send(bytes((4 << 20) + 1))  # above the frame limit: libzmq closes the connection
    client.send(Ping())
    assert isinstance(client.receive()[0], Pong)


def test_a_stream_is_forwarded_in_order_and_receipts_reach_the_worker(rig: Rig) -> None:
    """Fails if parts of a stream are reordered, or the worker does not get the client's receipts."""
    worker, client = rig.worker(), rig.client()
    sent = client.score(signal="logits")
    job_id, request, tokens = worker.job()
    rows, stream_id = np.random.default_rng(0).normal(size=(30, V)).astype(np.float32), worker.stream_id
    for index, start in enumerate((0, 10, 20)):
        message = rows_message(request, token_digest(tokens), rows, start, start + 10, stream_id, index)
        worker.reply(job_id, *message, final=start == 20)
        if index == 0:
            client.send(Received(request_id=sent.request_id, stream_id=stream_id, n_messages=1))
            client.send(Received(request_id=sent.request_id, stream_id=bytes(16), n_messages=9))
            receipt, _ = worker.receive()
            assert isinstance(receipt, JobReceived) and (receipt.job_id, receipt.n_messages) == (job_id, 1)
    got = [client.receive() for _ in range(3)]
    assert [header.index for header, _ in got] == [0, 1, 2]
    np.testing.assert_array_equal(
        np.concatenate([np.frombuffer(f[0], np.float32).reshape(10, V) for _, f in got]), rows
    )
    assert worker.receives_nothing(), "a receipt for another stream must not be forwarded"
    client.send(HeadRequest(request_id=os.urandom(16), wire="fp32", deadline_s=5.0))
    job_id, head_request, _ = worker.job()
    head = np.ones((V, H), np.float32)
    worker.reply(job_id, *rows_message(head_request, bytes(16), head, 0, V, worker.stream_id, 0, signal="head"))
    assert client.receive()[0].signal == "head"


@pytest.mark.parametrize(
    "second",
    [{"index": 2}, {"start": 11}, {"start": 9}, {"n_cols": V + 1}, {"signal": "hidden"}],
    ids=str,
)
def test_a_stream_with_a_gap_excludes_its_worker(rig: Rig, second: dict[str, Any]) -> None:
    """Fails if a row of a complete stream can be missing, repeated, or from another attempt."""
    worker, client = rig.worker(), rig.client()
    client.score(signal="logits")
    job_id, request, tokens = worker.job()
    rows, stream_id = np.zeros((30, V), np.float32), worker.stream_id
    digest = token_digest(tokens)
    worker.reply(job_id, *rows_message(request, digest, rows, 0, 10, stream_id, 0), final=False)
    rows = np.zeros((30, second.get("n_cols", V)), np.float32)  # the frame has the size that the header states
    header, frames = rows_message(request, digest, rows, second.get("start", 10), 30, stream_id, 1)
    worker.reply(job_id, structs.replace(header, **second), frames)
    assert rig.event("excluded")[1] == "w"


@pytest.mark.parametrize("rig", [{"worker_timeout_s": 0.5}], indirect=True)
def test_rows_of_an_earlier_attempt_are_dropped_without_exclusion(rig: Rig) -> None:
    """Fails if a worker that was briefly silent during a stream is excluded."""
    worker, client = rig.worker(), rig.client()
    client.score(signal="logits")
    job_id, request, tokens = worker.job()
    old_id, rows, digest = worker.stream_id, np.zeros((30, V), np.float32), token_digest(tokens)
    worker.reply(job_id, *rows_message(request, digest, rows, 0, 10, old_id, 0), final=False)
    client.receive()
    wait_until(lambda: not client.status().workers, 30.0, "the loss of the silent worker")
    worker.hello()
    assert worker.job()[0] == job_id and worker.stream_id != old_id
    worker.reply(job_id, *rows_message(request, digest, rows, 10, 30, old_id, 1))
    assert client.receives_nothing(), "rows of an earlier attempt"
    worker.reply(job_id, *rows_message(request, digest, rows, 0, 30, worker.stream_id, 0))
    assert client.receive()[0].stop == 30 and client.status().excluded == {}


def test_long_texts_of_a_worker_are_truncated(rig: Rig) -> None:
    """Fails if a long text of a worker makes a message that the codec refuses."""
    rig.worker(name="w", model_path="/" + "m" * 4090)
    other = rig.worker(name="v", pid=2, model_fingerprint="g")
    assert len(other.receive()[0].why) <= 1000
    client = rig.client()
    client.send(Ping())
    assert isinstance(client.receive()[0], Pong)


def test_a_reconnected_worker_gets_its_requests_again(rig: Rig) -> None:
    """Fails if requests lost with a broken connection wait for their deadline."""
    first, client = rig.worker(), rig.client()
    client.score()
    job_id, _, _ = first.job()
    second = rig.worker()  # same process, new identity
    again, request, tokens = second.job()
    assert again == job_id
    second.reply(again, *make_reply(request, tokens))
    assert isinstance(client.receive()[0], ScoreReply)


@pytest.mark.parametrize(
    "changes",
    [{"model_fingerprint": "g"}, {"dtype": "bfloat16"}, {"tokenizer_fingerprint": "u"}, {"name": "w"}],
    ids=str,
)
def test_a_worker_that_differs_from_the_first_is_refused(rig: Rig, changes: dict[str, Any]) -> None:
    """Fails if workers of two models serve one teacher, or two have the same name."""
    rig.worker()
    other = rig.worker(**({"name": "v", "pid": 2} | changes))
    message, _ = other.receive()
    assert isinstance(message, Dismiss)
    (field,) = changes
    expected = "the name w " if field == "name" else f"{field} {changes[field]} differs from the "
    assert expected in message.why and str(getattr(make_hello(), field)) in message.why


def test_deadlines_and_cancels_reach_the_worker(rig: Rig) -> None:
    """Fails if a worker continues a request that has expired or was cancelled."""
    worker, client = rig.worker(), rig.client()
    sent = client.score(deadline_s=0.3)
    job_id, _, _ = worker.job()
    header, _ = client.receive()
    assert isinstance(header, ErrorReply) and (header.code, header.request_id) == ("deadline", sent.request_id)
    assert worker.receive()[0] == JobCancel(job_id=job_id)
    sent = client.score()
    job_id, request, tokens = worker.job()
    client.send(Cancel(request_id=sent.request_id))
    assert worker.receive()[0] == JobCancel(job_id=job_id)
    worker.reply(job_id, *make_reply(request, tokens))
    assert client.receives_nothing()


@pytest.mark.parametrize("rig", [{"teachers": {"math": "f", "code": ""}}], indirect=True)
def test_names_of_teachers(rig: Rig) -> None:
    """Fails if a request with no teacher name, or a wrong one, is scored by some teacher of several."""
    client = rig.client()

    def info(name: str) -> Any:
        client.send(InfoRequest(request_id=bytes(16), teacher=name))
        return client.receive()[0]

    assert info("math").code == "busy", "its worker has not joined yet"
    math = rig.worker(name="wm", pid=1, teacher="math", template_fingerprint="form", template_example="Q")
    code = rig.worker(name="wc", pid=2, teacher="code", model_fingerprint="g", vocab_size=99)
    assert (info("math").model_fingerprint, info("code").vocab_size) == ("f", 99)
    assert (info("math").template_fingerprint, info("math").template_example) == ("form", "Q")
    for name in ("", "art"):
        assert info(name).code == "bad_request" and repr(name).strip("'") in info(name).text
        assert "code, math" in info(name).text
        client.score(teacher=name)
        assert client.receive()[0].text == info(name).text
    other = rig.worker(name="wx", pid=3, teacher="maths")
    refusal = other.receive()[0].why
    assert "'maths'" in refusal and "code, math" in refusal
    client.score(teacher="code")
    assert code.job()[1].teacher == "code" and math.receives_nothing()


def test_draining_finishes_admitted_requests(rig: Rig) -> None:
    """Fails if a drain drops a request, admits a new one, or never reports its end."""
    worker, client = rig.worker(), rig.client()
    sent = client.score()
    client.send(DrainRequest(request_id=bytes(16)))
    reply, _ = client.receive()
    assert isinstance(reply, DrainReply) and reply.n_left == 1
    client.score()
    refused, _ = client.receive()
    assert refused.code == "draining" and refused.retry_after_s > 0
    client.send(sent, as_frame(make_tokens()))  # a resend of an admitted request is not new
    client.send(Ping())
    assert isinstance(client.receive()[0], Pong), "the resend arrives before the worker's reply on another socket"
    job_id, request, tokens = worker.job()
    worker.reply(job_id, *make_reply(request, tokens))
    assert isinstance(client.receive()[0], ScoreReply)
    rig.event("drained")
    client.send(Ping())
    assert client.receive()[0].draining


def test_a_drained_worker_finishes_and_is_dismissed(rig: Rig) -> None:
    """Fails if draining one worker loses requests, or the worker is never dismissed."""
    worker, client = rig.worker(), rig.client()
    client.score()
    job_id, request, tokens = worker.job()

    def drain(name: str) -> Any:
        client.send(DrainRequest(request_id=bytes(16), worker=name))
        return client.receive()[0]

    assert drain("w").n_left == 1
    client.score()
    assert worker.receives_nothing(), "a leaving worker gets no new request"
    worker.reply(job_id, *make_reply(request, tokens))
    assert isinstance(client.receive()[0], ScoreReply)
    assert worker.receive()[0] == Dismiss()
    assert rig.event("dismissed")[1] == "w"
    worker.hello()  # it was on its way when the broker dismissed the worker, and must not bring it back
    assert drain("w").n_left == 0, "a repeated drain is harmless"
    assert not client.status().workers
    assert drain("unknown").code == "bad_request"
    assert client.status().n_queued == 1, "the second request waits for another worker"


@pytest.mark.parametrize("rig", [{"teachers": {"": "f"}}], indirect=True)
def test_a_worker_of_another_model_does_not_join_even_if_it_is_first(rig: Rig) -> None:
    """Fails if a worker left over from another model determines the model of a restarted server."""
    stale = rig.worker(model_fingerprint="old")
    assert "model_fingerprint old differs from the f" in stale.receive()[0].why
    assert rig.client().status().workers == []


def test_a_drained_worker_stays_drained_after_a_reconnect(rig: Rig) -> None:
    """Fails if a drained worker gets requests again after its connection broke."""
    first, client = rig.worker(), rig.client()
    client.score()
    first.job()
    client.send(DrainRequest(request_id=bytes(16), worker="w"))
    client.receive()
    second = rig.worker()  # the same process over a new connection; its hello does not contain the drain
    assert second.receive()[0] == Dismiss()
    assert client.status().n_queued == 1


@pytest.mark.parametrize("rig", [{"worker_port": 0}], indirect=True)
def test_names_of_local_workers_are_reserved(rig: Rig) -> None:
    """Fails if a remote worker can use the name of a local one, whose refusal would end the server."""
    remote = ScriptedWorker(rig.context, f"tcp://127.0.0.1:{rig.broker.worker_port}", name="w0.0")
    assert "name w0.0" in remote.receive()[0].why
    assert rig.broker.events.empty()


def test_a_dead_broker_thread_can_be_stopped(tmp_path: Path) -> None:
    """Fails if only SIGKILL ends a server whose broker thread has died."""

    class Dying(Broker):
        def _tick(self, now_s: float) -> None:
            raise ZeroDivisionError

    broker = Dying("127.0.0.1", 0, f"ipc://{tmp_path}/workers")
    broker.start()
    wait_until(lambda: not broker.alive, 30.0, "the broker's end")
    broker.worker_died("w0.0")
    broker.stop()


def test_an_engine_error_is_final_without_another_worker(rig: Rig) -> None:
    """Fails if a client waits for its time-out after an engine error, or no other worker retries the request."""
    worker, client = rig.worker(), rig.client()
    sent = client.score()
    job_id, request, _ = worker.job()
    worker.reply(job_id, ErrorReply(request_id=request.request_id, code="engine", text="out of memory"))
    header, _ = client.receive()
    assert (header.code, header.text, header.request_id) == ("engine", "out of memory", sent.request_id)
    other = rig.worker(name="v", pid=2)
    client.score()
    first, second = (worker, other) if worker.socket.poll(1000) else (other, worker)
    job_id, request, tokens = first.job()
    first.reply(job_id, ErrorReply(request_id=request.request_id, code="engine", text="faulty GPU"))
    job_id, request, tokens = second.job()
    second.reply(job_id, *make_reply(request, tokens, worker="v" if second is other else "w"))
    assert isinstance(client.receive()[0], ScoreReply)
