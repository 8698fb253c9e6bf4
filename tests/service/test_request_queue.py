"""Rules of the request queue, one at a time, without sockets or waiting."""

from __future__ import annotations

from typing import Any

import pytest

from teacher_server.broker.request_queue import Admission, RequestQueue
from teacher_server.wire.protocol import ID_BYTES, ScoreRequest
from teacher_server.wire.worker_protocol import WorkerHello
from tests.service.messages import make_hello, make_request, make_tokens


def hello(credit_tokens: int = 100, **changes: Any) -> WorkerHello:
    return make_hello(credit_tokens=credit_tokens, **changes)


def request(total_length: int = 40, **changes: Any) -> ScoreRequest:
    return make_request(make_tokens(total_length), **changes)


def submit(
    queue: RequestQueue, client: bytes, one: ScoreRequest, n_bytes: int = 0, now_s: float = 0.0, teacher: str = ""
) -> Admission:
    return queue.submit(client, teacher, one, [], bytes(ID_BYTES), n_bytes, now_s)


def make_queue(max_queue_bytes: int = 1 << 20, max_attempts: int = 3, **workers: WorkerHello) -> RequestQueue:
    """Return a queue with these workers, which it heard of at time 0."""
    queue = RequestQueue(b"epoch---", max_queue_bytes, max_attempts)
    for name, worker in workers.items():
        queue.heartbeat(name.encode(), worker, 0.0)
    return queue


def test_dispatch_respects_credit_and_order() -> None:
    """Fails if a worker gets more requests than its credit, or a later request overtakes an earlier one."""
    queue = make_queue()
    submitted = [request(40) for _ in range(5)]
    for one in submitted:
        assert submit(queue, b"c", one, 0, 0.0) == "queued"
    assert list(queue.assign()) == [], "no worker has joined"
    queue.heartbeat(b"a", hello(100), 0.0)
    queue.heartbeat(b"b", hello(100), 0.0)
    assigned = list(queue.assign())
    assert [job.request for _, job in assigned] == submitted[:4]
    assert sorted(worker for worker, _ in assigned) == [b"a", b"a", b"b", b"b"]
    completed = queue.complete(assigned[0][0], assigned[0][1].job_id)
    assert completed is assigned[0][1]
    assert [worker for worker, _ in queue.assign()] == [assigned[0][0]]


def test_a_sequence_longer_than_the_credit_is_still_served() -> None:
    """Fails if a sequence longer than every worker's credit blocks the queue forever."""
    queue = make_queue(a=hello(10))
    submit(queue, b"c", request(40), 0, 0.0)
    assert len(list(queue.assign())) == 1


def test_a_resend_is_not_queued_twice_but_renews_the_deadline() -> None:
    """Fails if a resend after a client's time-out doubles the work of a busy server."""
    queue = make_queue()
    one = request(deadline_s=10.0)
    assert submit(queue, b"c", one, 0, 0.0) == "queued"
    assert submit(queue, b"c", one, 0, 8.0) == "known"
    assert queue.expire(15.0) == [] and queue.n_queued == 1
    assert submit(queue, b"another", one, 0, 8.0) == "queued", "request ids of two clients may collide"


def test_requests_of_a_lost_worker_are_requeued_first() -> None:
    """Fails if a dead worker's requests are dropped, or queued behind later requests."""
    queue = make_queue(a=hello(100))
    submitted = [request(40) for _ in range(3)]
    for one in submitted:
        submit(queue, b"c", one, 0, 0.0)
    assert len(list(queue.assign())) == 2
    assert queue.remove_worker(b"a") == []
    queue.heartbeat(b"b", hello(1000), 0.0)
    assert [(worker, job.request) for worker, job in queue.assign()] == [(b"b", one) for one in submitted]


@pytest.mark.parametrize("is_assigned_again", [True, False])
def test_only_the_first_reply_counts(is_assigned_again: bool) -> None:
    """Fails if the late reply of a worker that was marked lost causes a second reply to the client, or leaves the job
    in the queue, with its bytes, so that it is computed a second time.
    """
    queue = make_queue(a=hello())
    submit(queue, b"c", request(), 500, 0.0)
    ((_, job),) = queue.assign()
    queue.remove_worker(b"a")
    queue.heartbeat(b"b", hello(), 0.0)
    assert queue.n_queued == 1
    if is_assigned_again:
        assert [worker for worker, _ in queue.assign()] == [b"b"]
    assert queue.complete(b"a", job.job_id) is job, "a late reply is valid"
    assert (queue.n_queued, queue.queued_bytes, list(queue.assign())) == (0, 0, [])
    assert queue.complete(b"b", job.job_id) is None
    assert queue.workers[b"b"].n_tokens == 0, "its credit is released"
    assert queue.complete(b"b", b"x" * 16) is None


def test_a_request_that_kills_workers_is_given_up() -> None:
    """Fails if a sequence that crashes workers is assigned again forever."""
    queue = make_queue(max_attempts=3)
    submit(queue, b"c", request(), 0, 0.0)
    for attempt in range(3):
        queue.heartbeat(b"a", hello(), 0.0)
        assert len(list(queue.assign())) == 1
        assert len(queue.remove_worker(b"a")) == (attempt == 2)
    assert queue.n_queued == 0


def test_deadlines_and_missing_heartbeats() -> None:
    """Fails if a request past its deadline is kept, or a worker without heartbeats is not detected."""
    queue = make_queue(a=hello())
    submit(queue, b"c", request(deadline_s=5.0), 100, 0.0)
    assert queue.expire(4.9) == []
    assert len(queue.expire(5.1)) == 1
    assert (queue.n_queued, queue.queued_bytes) == (0, 0)
    assert queue.silent_workers(9.0, 10.0) == [] and queue.silent_workers(10.1, 10.0) == [b"a"]
    queue.heartbeat(b"a", hello(), 10.1)
    assert queue.silent_workers(10.2, 10.0) == []


def test_clients_are_served_round_robin() -> None:
    """Fails if the long queue of one client delays the first request of another."""
    queue = make_queue()
    many = [request(40) for _ in range(4)]
    for one in many:
        submit(queue, b"greedy", one)
    single = request(40)
    submit(queue, b"modest", single)
    queue.heartbeat(b"a", hello(80), 0.0)
    assert [job.request for _, job in queue.assign()] == [many[0], single]
    queue.heartbeat(b"b", hello(1000), 0.0)
    assert [job.request for _, job in queue.assign()] == many[1:], "each client's order is kept"


@pytest.mark.parametrize("n_tokens", [90, 900])
def test_small_requests_of_others_do_not_keep_a_large_one_waiting(n_tokens: int) -> None:
    """Fails if a long sequence, of most of the credit or more than it, waits until all other clients are idle."""
    queue = make_queue(a=hello(100), b=hello(100))
    for _ in range(6):
        submit(queue, b"many", request(30))
    running = list(queue.assign())
    assert len(running) == 6
    large = request(n_tokens)
    submit(queue, b"one", large)
    for _ in range(20):  # whenever a request is finished, the other client has a new one
        submit(queue, b"many", request(30))
        worker, job = running.pop(0)
        queue.complete(worker, job.job_id)
        running += queue.assign()
        assert len({worker for worker, _ in running}) == 2, "no worker is idle"
        if large in [job.request for _, job in running]:
            return
    raise AssertionError("it was never assigned")


def test_teachers_do_not_wait_for_each_other() -> None:
    """Fails if a request is assigned to another teacher's worker, or a teacher without workers blocks the others."""
    queue = make_queue()
    math, code = request(), request()
    submit(queue, b"c", math, teacher="math")
    submit(queue, b"c", code, teacher="code")
    queue.heartbeat(b"a", hello(teacher="code"), 0.0)
    assert [job.request for _, job in queue.assign()] == [code]
    assert (queue.n_queued_for("math"), queue.n_queued_for("code")) == (1, 0)


def test_an_engine_error_is_retried_on_each_worker_once() -> None:
    """Fails if an error on a faulty GPU is final while another worker is available, or is retried forever."""
    queue = make_queue(a=hello(name="wa"))
    submit(queue, b"c", request())
    ((_, job),) = queue.assign()
    assert not queue.retry(job, failed_on="wa"), "no other worker"
    queue.heartbeat(b"b", hello(name="wb"), 0.0)
    assert queue.retry(job, failed_on="wa")
    assert queue.workers[b"a"].n_tokens == 0
    assert [worker for worker, _ in queue.assign()] == [b"b"]
    assert not queue.retry(job, failed_on="wb")


def test_a_failed_job_is_assigned_to_the_same_worker_if_no_other_is_left() -> None:
    """Fails if such a job, and the queue behind it, waits for its deadline."""
    queue = make_queue(a=hello(name="wa"), b=hello(name="wb"))
    submit(queue, b"c", request())
    ((first, job),) = queue.assign()
    assert queue.retry(job, failed_on=queue.workers[first].hello.name)
    queue.remove_worker(b"b" if first == b"a" else b"a")
    assert [worker for worker, _ in queue.assign()] == [first]


def test_cancelled_requests_release_queue_bytes_and_credit() -> None:
    """Fails if cancelled requests keep a worker busy, or their bytes keep the queue full."""
    queue = make_queue(a=hello(40))
    for later in (first := request(40), request(40)):
        submit(queue, b"c", later, n_bytes=100)
    ((_, running),) = queue.assign()
    waiting = queue.find_request(b"c", later.request_id)
    assert running.request is first and waiting is not None
    queue.drop(waiting)
    assert (queue.n_queued, queue.queued_bytes) == (0, 0)
    queue.drop(running)
    assert running.worker == b"a" and queue.workers[b"a"].n_tokens == 0
    assert queue.complete(b"a", running.job_id) is None and queue.n_jobs == 0


def test_the_end_of_a_stream_counts_only_with_its_beginning() -> None:
    """Fails if the last rows of a lost worker complete a stream that another worker has started."""
    queue = make_queue(a=hello(name="wa"))
    submit(queue, b"c", request(signal="logits"))
    ((_, job),) = queue.assign()
    queue.remove_worker(b"a")
    queue.heartbeat(b"b", hello(name="wb"), 0.0)
    assert len(list(queue.assign())) == 1
    queue.heartbeat(b"a", hello(name="wa"), 0.0)
    assert queue.complete(b"a", job.job_id) is None
    assert queue.complete(b"b", job.job_id) is job


def test_a_reconnect_does_not_count_as_an_attempt() -> None:
    """Fails if an unstable network uses up the attempts of a request."""
    queue = make_queue(max_attempts=2)
    submit(queue, b"c", request())
    for _ in range(5):
        queue.heartbeat(b"a", hello(), 0.0)
        assert len(list(queue.assign())) == 1
        assert queue.remove_worker(b"a", blame=False) == []


def test_a_waiting_request_reserves_one_worker_only() -> None:
    """Fails if a large request that waits for credit keeps small ones from all other workers."""
    queue = make_queue(a=hello(100), b=hello(100), c=hello(100))
    for _ in range(3):
        submit(queue, b"many", request(40))
    assert len({worker for worker, _ in queue.assign()}) == 3
    submit(queue, b"one", request(90))
    for _ in range(6):
        submit(queue, b"many", request(20))
    assert sorted(worker for worker, _ in queue.assign()) in (
        [b"b"] * 3 + [b"c"] * 3,
        [b"a"] * 3 + [b"c"] * 3,
        [b"a"] * 3 + [b"b"] * 3,
    )
