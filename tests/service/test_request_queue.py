"""The broker's rules, one at a time, without sockets or waiting."""

from __future__ import annotations

from typing import Any

from teacher_server.broker.request_queue import Admission, RequestQueue
from teacher_server.wire.protocol import ID_BYTES, ScoreRequest
from teacher_server.wire.worker_protocol import WorkerHello
from tests.service.messages import make_hello, make_request, make_tokens


def hello(credit_tokens: int = 100, **changes: Any) -> WorkerHello:
    return make_hello(credit_tokens=credit_tokens, **changes)


def request(total_length: int = 40, **changes: Any) -> ScoreRequest:
    return make_request(make_tokens(total_length), **changes)


def submit(
    ledger: RequestQueue, client: bytes, one: ScoreRequest, n_bytes: int = 0, now_s: float = 0.0, teacher: str = ""
) -> Admission:
    return ledger.submit(client, teacher, one, [], bytes(ID_BYTES), n_bytes, now_s)


def make_ledger(max_queue_bytes: int = 1 << 20, max_attempts: int = 3) -> RequestQueue:
    return RequestQueue(b"epoch---", max_queue_bytes, max_attempts)


def test_dispatch_respects_credit_and_order() -> None:
    """Would break if one worker hoarded work, or a later request overtook an earlier one."""
    ledger = make_ledger()
    asked = [request(40) for _ in range(5)]
    for one in asked:
        assert submit(ledger, b"c", one, 0, 0.0) == "queued"
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
    submit(ledger, b"c", request(40), 0, 0.0)
    assert len(list(ledger.assign())) == 1


def test_full_queue_says_so_and_frees_up() -> None:
    """Would break if memory grew with the number of impatient clients."""
    ledger = make_ledger(max_queue_bytes=10_000)
    answers = [submit(ledger, b"c", request(), 3000, 0.0) for _ in range(4)]
    assert answers == ["queued", "queued", "full", "full"]
    ledger.hello(b"a", hello(1000), 0.0)
    assert len(list(ledger.assign())) == 2
    assert ledger.queued_bytes == 0
    assert submit(ledger, b"c", request(), 3000, 0.0) == "queued"


def test_a_resend_is_not_computed_twice_but_lives_longer() -> None:
    """Would break if every time-out of a client doubled the work of a busy server."""
    ledger = make_ledger()
    one = request(deadline_s=10.0)
    assert submit(ledger, b"c", one, 0, 0.0) == "queued"
    assert submit(ledger, b"c", one, 0, 8.0) == "known"
    assert ledger.expire(15.0) == [] and ledger.n_queued == 1
    assert submit(ledger, b"another", one, 0, 8.0) == "queued", "request ids of two clients may collide"


def test_lost_work_goes_first_and_elsewhere() -> None:
    """Would break if a dead worker's requests were dropped, or went behind everything that came later."""
    ledger = make_ledger()
    ledger.hello(b"a", hello(100), 0.0)
    asked = [request(40) for _ in range(3)]
    for one in asked:
        submit(ledger, b"c", one, 0, 0.0)
    assert len(list(ledger.assign())) == 2
    assert ledger.lose(b"a") == []
    ledger.hello(b"b", hello(1000), 0.0)
    assert [(worker, job.request) for worker, job in ledger.assign()] == [(b"b", one) for one in asked]


def test_only_the_first_answer_counts() -> None:
    """Would break if a worker thought lost, and late, made a client get two replies."""
    ledger = make_ledger()
    ledger.hello(b"a", hello(), 0.0)
    submit(ledger, b"c", request(), 0, 0.0)
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
    submit(ledger, b"c", request(), 500, 0.0)
    ((_, job),) = ledger.assign()
    ledger.lose(b"a")
    assert ledger.n_queued == 1
    assert ledger.complete(b"a", job.job_id) is job
    assert (ledger.n_queued, ledger.queued_bytes) == (0, 0)


def test_a_request_that_kills_workers_is_given_up() -> None:
    """Would break if one poisonous sequence took down worker after worker for ever."""
    ledger = make_ledger(max_attempts=3)
    submit(ledger, b"c", request(), 0, 0.0)
    for attempt in range(3):
        ledger.hello(b"a", hello(), 0.0)
        assert len(list(ledger.assign())) == 1
        assert len(ledger.lose(b"a")) == (attempt == 2)
    assert ledger.n_queued == 0


def test_deadlines_and_silence() -> None:
    """Would break if work nobody waits for was kept, or a silent worker was trusted."""
    ledger = make_ledger()
    ledger.hello(b"a", hello(), 0.0)
    submit(ledger, b"c", request(deadline_s=5.0), 100, 0.0)
    assert ledger.expire(4.9) == []
    assert len(ledger.expire(5.1)) == 1
    assert (ledger.n_queued, ledger.queued_bytes) == (0, 0)
    assert ledger.silent(9.0, 10.0) == [] and ledger.silent(10.1, 10.0) == [b"a"]
    ledger.hello(b"a", hello(), 10.1)
    assert ledger.silent(10.2, 10.0) == []


def test_clients_take_turns() -> None:
    """Would break if one trainer's full queue held up everyone else's first request."""
    ledger = make_ledger()
    many = [request(40) for _ in range(4)]
    for one in many:
        submit(ledger, b"greedy", one)
    single = request(40)
    submit(ledger, b"modest", single)
    ledger.hello(b"a", hello(80), 0.0)
    assert [job.request for _, job in ledger.assign()] == [many[0], single]
    ledger.hello(b"b", hello(1000), 0.0)
    assert [job.request for _, job in ledger.assign()] == many[1:], "a client's own order stays"


def test_teachers_do_not_wait_for_each_other() -> None:
    """Would break if a request went to another teacher's worker, or an absent one blocked the queue of those there."""
    ledger = make_ledger()
    math, code = request(), request()
    submit(ledger, b"c", math, teacher="math")
    submit(ledger, b"c", code, teacher="code")
    ledger.hello(b"a", hello(teacher="code"), 0.0)
    assert [job.request for _, job in ledger.assign()] == [code]
    assert (ledger.n_queued_for("math"), ledger.n_queued_for("code")) == (1, 0)


def test_an_engine_error_is_tried_elsewhere_once() -> None:
    """Would break if one sick device ended a run while a healthy one stood by, or two played ball for ever."""
    ledger = make_ledger()
    ledger.hello(b"a", hello(name="wa"), 0.0)
    submit(ledger, b"c", request())
    ((_, job),) = ledger.assign()
    assert not ledger.retry(job, failed_on="wa"), "there is nobody else"
    ledger.hello(b"b", hello(name="wb"), 0.0)
    assert ledger.retry(job, failed_on="wa")
    assert ledger.workers[b"a"].n_tokens == 0
    assert [worker for worker, _ in ledger.assign()] == [b"b"]
    assert not ledger.retry(job, failed_on="wb")


def test_a_job_that_failed_somewhere_is_not_stuck_when_that_one_is_left_alone() -> None:
    """Would break if it waited for its deadline, and the queue behind it with it."""
    ledger = make_ledger()
    ledger.hello(b"a", hello(name="wa"), 0.0)
    ledger.hello(b"b", hello(name="wb"), 0.0)
    submit(ledger, b"c", request())
    ((first, job),) = ledger.assign()
    assert ledger.retry(job, failed_on=ledger.workers[first].hello.name)
    ledger.lose(b"b" if first == b"a" else b"a")
    assert [worker for worker, _ in ledger.assign()] == [first]


def test_cancelled_work_frees_its_place() -> None:
    """Would break if an abandoned batch of a trainer kept the teacher busy, or its bytes the queue full."""
    ledger = make_ledger()
    ledger.hello(b"a", hello(40), 0.0)
    for _ in range(2):
        submit(ledger, b"c", request(40), n_bytes=100)
    ((_, running),) = ledger.assign()
    waiting = next(job for job in ledger._jobs.values() if job is not running)
    ledger.cancel(waiting)
    assert (ledger.n_queued, ledger.queued_bytes) == (0, 0)
    ledger.cancel(running)
    assert running.worker == b"a" and ledger.workers[b"a"].n_tokens == 0
    assert ledger.complete(b"a", running.job_id) is None and ledger.n_jobs == 0


def test_a_stream_ends_only_with_its_own_beginning() -> None:
    """Would break if the last rows of a worker thought lost completed what another one had begun to send."""
    ledger = make_ledger()
    ledger.hello(b"a", hello(name="wa"), 0.0)
    submit(ledger, b"c", request(signal="logits"))
    ((_, job),) = ledger.assign()
    ledger.lose(b"a")
    ledger.hello(b"b", hello(name="wb"), 0.0)
    assert len(list(ledger.assign())) == 1
    ledger.hello(b"a", hello(name="wa"), 0.0)
    assert ledger.complete(b"a", job.job_id) is None
    assert ledger.complete(b"b", job.job_id) is job


def test_who_leaves_gets_nothing_and_may_go_when_done() -> None:
    """Would break if a drained worker was given new work, or sent home with work in its hands."""
    ledger = make_ledger()
    ledger.hello(b"a", hello(), 0.0)
    submit(ledger, b"c", request())
    ((_, job),) = ledger.assign()
    ledger.hello(b"a", hello(leaving=True), 0.1)
    submit(ledger, b"c", request())
    assert list(ledger.assign()) == [] and ledger.leavers() == []
    ledger.complete(b"a", job.job_id)
    assert ledger.leavers() == [b"a"]


def test_a_reconnection_is_not_the_jobs_fault() -> None:
    """Would break if a flapping network used up a request's attempts and failed a healthy sequence."""
    ledger = make_ledger(max_attempts=2)
    submit(ledger, b"c", request())
    for _ in range(5):
        ledger.hello(b"a", hello(), 0.0)
        assert len(list(ledger.assign())) == 1
        assert ledger.lose(b"a", blame=False) == []
