"""The broker's rules, one at a time, without sockets or waiting."""

from __future__ import annotations

import os

from teacher_server.backplane import WorkerHello
from teacher_server.ledger import Ledger
from teacher_server.protocol import ScoreRequest


def hello(credit_tokens: int = 100) -> WorkerHello:
    return WorkerHello(
        name="w",
        model_name="m",
        model_path="/m",
        model_fingerprint="f",
        tokenizer_fingerprint="",
        vocab_size=10,
        max_tokens=100,
        engine="hf",
        device="cpu",
        credit_tokens=credit_tokens,
    )


def request(total_length: int = 40, deadline_s: float = 10.0) -> ScoreRequest:
    return ScoreRequest(
        request_id=os.urandom(16),
        signal="topk",
        k=1,
        temperature=1.0,
        n_vocab=0,
        prompt_length=1,
        total_length=total_length,
        wire="fp16",
        deadline_s=deadline_s,
        checksum=0,
    )


def make_ledger(max_queue_bytes: int = 1 << 20, max_attempts: int = 3) -> Ledger:
    return Ledger(b"epoch---", max_queue_bytes, max_attempts)


def test_dispatch_respects_credit_and_order() -> None:
    """Would break if one worker hoarded work, or a later request overtook an earlier one."""
    ledger = make_ledger()
    asked = [request(40) for _ in range(5)]
    for one in asked:
        assert ledger.submit(b"c", one, [], 0, 0.0) == "queued"
    assert list(ledger.assign()) == [], "nobody to work"
    ledger.hello(b"a", hello(100), 0.0)
    ledger.hello(b"b", hello(100), 0.0)
    given = list(ledger.assign())
    assert [job.request for _, job in given] == asked[:4]
    assert sorted(worker for worker, _ in given) == [b"a", b"a", b"b", b"b"]
    done = ledger.complete(given[0][0], given[0][1].job_id)
    assert done is given[0][1]
    assert [worker for worker, _ in ledger.assign()] == [given[0][0]]


def test_a_sequence_longer_than_the_credit_is_still_served() -> None:
    """Would break if the longest sequence blocked the queue for ever."""
    ledger = make_ledger()
    ledger.hello(b"a", hello(10), 0.0)
    ledger.submit(b"c", request(40), [], 0, 0.0)
    assert len(list(ledger.assign())) == 1


def test_full_queue_says_so_and_frees_up() -> None:
    """Would break if memory grew with the number of impatient clients."""
    ledger = make_ledger(max_queue_bytes=10_000)
    answers = [ledger.submit(b"c", request(), [], 3000, 0.0) for _ in range(4)]
    assert answers == ["queued", "queued", "full", "full"]
    ledger.hello(b"a", hello(1000), 0.0)
    assert len(list(ledger.assign())) == 2
    assert ledger.queued_bytes == 0
    assert ledger.submit(b"c", request(), [], 3000, 0.0) == "queued"


def test_a_resend_is_not_computed_twice_but_lives_longer() -> None:
    """Would break if every time-out of a client doubled the work of a busy server."""
    ledger = make_ledger()
    one = request(deadline_s=10.0)
    assert ledger.submit(b"c", one, [], 0, 0.0) == "queued"
    assert ledger.submit(b"c", one, [], 0, 8.0) == "known"
    assert ledger.expire(15.0) == [] and ledger.n_queued == 1
    assert ledger.submit(b"another", one, [], 0, 8.0) == "queued", "request ids of two clients may collide"


def test_lost_work_goes_first_and_elsewhere() -> None:
    """Would break if a dead worker's requests were dropped, or went behind everything that came later."""
    ledger = make_ledger()
    ledger.hello(b"a", hello(100), 0.0)
    asked = [request(40) for _ in range(3)]
    for one in asked:
        ledger.submit(b"c", one, [], 0, 0.0)
    assert len(list(ledger.assign())) == 2
    assert ledger.lose(b"a") == []
    ledger.hello(b"b", hello(1000), 0.0)
    assert [(worker, job.request) for worker, job in ledger.assign()] == [(b"b", one) for one in asked]


def test_only_the_first_answer_counts() -> None:
    """Would break if a worker thought lost, and late, made a client get two replies."""
    ledger = make_ledger()
    ledger.hello(b"a", hello(), 0.0)
    ledger.submit(b"c", request(), [], 0, 0.0)
    ((_, job),) = ledger.assign()
    ledger.lose(b"a")
    ledger.hello(b"b", hello(), 0.0)
    assert [worker for worker, _ in ledger.assign()] == [b"b"]
    assert ledger.complete(b"a", job.job_id) is job, "the late one is as good"
    assert ledger.complete(b"b", job.job_id) is None
    assert ledger.workers[b"b"].n_tokens == 0, "its credit came back"
    assert ledger.complete(b"b", b"x" * 16) is None


def test_a_late_answer_ends_a_job_that_waits_again() -> None:
    """Would break if an answered job stayed in the queue, with its bytes, and was computed for nobody."""
    ledger = make_ledger()
    ledger.hello(b"a", hello(), 0.0)
    ledger.submit(b"c", request(), [], 500, 0.0)
    ((_, job),) = ledger.assign()
    ledger.lose(b"a")
    assert ledger.n_queued == 1
    assert ledger.complete(b"a", job.job_id) is job
    assert (ledger.n_queued, ledger.queued_bytes) == (0, 0)


def test_a_request_that_kills_workers_is_given_up() -> None:
    """Would break if one poisonous sequence took down worker after worker for ever."""
    ledger = make_ledger(max_attempts=3)
    ledger.submit(b"c", request(), [], 0, 0.0)
    for attempt in range(3):
        ledger.hello(b"a", hello(), 0.0)
        assert len(list(ledger.assign())) == 1
        assert len(ledger.lose(b"a")) == (attempt == 2)
    assert ledger.n_queued == 0


def test_deadlines_and_silence() -> None:
    """Would break if work nobody waits for was kept, or a silent worker was trusted."""
    ledger = make_ledger()
    ledger.hello(b"a", hello(), 0.0)
    ledger.submit(b"c", request(deadline_s=5.0), [], 100, 0.0)
    assert ledger.expire(4.9) == []
    assert len(ledger.expire(5.1)) == 1
    assert (ledger.n_queued, ledger.queued_bytes) == (0, 0)
    assert ledger.silent(9.0, 10.0) == [] and ledger.silent(10.1, 10.0) == [b"a"]
    ledger.hello(b"a", hello(), 10.1)
    assert ledger.silent(10.2, 10.0) == []
