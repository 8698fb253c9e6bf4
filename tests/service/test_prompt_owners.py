"""Sequences with a common prompt at the broker: what they cost, and which worker gets them.

Through sockets: `test_the_responses_to_a_prompt_go_to_one_worker` of test_broker.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from teacher_server.broker.request_queue import PromptOwners, RequestQueue
from teacher_server.wire.protocol import ID_BYTES, ScoreRequest, as_frame
from teacher_server.wire.worker_protocol import computed_tokens, prompts_of
from tests.service.messages import make_request
from tests.service.test_request_queue import hello, make_queue

BLOCK = 16


def tokens_of(prompt: int, n_prompt: int, n_response: int, vocab: int = 50) -> np.ndarray:
    """Return [P + R] int32: the prompt with this number, and a response that no other one has."""
    own = np.random.default_rng().integers(0, vocab, n_response)
    return np.concatenate([np.random.default_rng(prompt).integers(0, vocab, n_prompt), own]).astype(np.int32)


def request_of(sequences: Sequence[tuple[int, int, int]]) -> tuple[ScoreRequest, np.ndarray]:
    """Return a request of sequences (prompt, P, R), and its tokens."""
    tokens = np.concatenate([tokens_of(*sequence) for sequence in sequences])
    n_prompt = sum(n for _, n, _ in sequences)
    lengths = [(p, p + r) for _, p, r in sequences] if len(sequences) > 1 else []
    return make_request(tokens, prompt_length=n_prompt, lengths=lengths), tokens


def submit(queue: RequestQueue, *sequences: tuple[int, int, int], teacher: str = "") -> None:
    request, tokens = request_of(sequences)
    prompts = prompts_of(request, as_frame(tokens))
    assert queue.submit(b"c", teacher, request, [], bytes(ID_BYTES), 0, 0.0, prompts) == "queued"


def two_workers(credit_tokens: int, **changes: Any) -> RequestQueue:
    return make_queue(**{name: hello(credit_tokens, name=name, **changes) for name in "ab"})


def workers_of(queue: RequestQueue) -> list[bytes]:
    return [worker for worker, _ in queue.assign()]


def test_a_common_prompt_counts_once() -> None:
    """Fails if credit counts tokens that an engine does not compute: a worker would get too few sequences."""
    assert computed_tokens(100, 130, BLOCK, known=False) == 130
    assert computed_tokens(100, 130, BLOCK, known=True) == 30 + BLOCK
    assert computed_tokens(BLOCK, 30, BLOCK, known=True) == 30, "a prompt of one block is not shared"
    assert computed_tokens(100, 130, 0, known=True) == 130, "an engine that does not share"
    queue = make_queue(a=hello(300, prefix_block=BLOCK))
    submit(queue, (1, 100, 30), (2, 60, 10), (1, 100, 20))
    assert workers_of(queue) == [b"a"]
    assert queue.workers[b"a"].n_tokens == 130 + 70 + 20 + BLOCK
    submit(queue, (2, 60, 40))
    submit(queue, (3, 60, 40))
    assert workers_of(queue) == [b"a"], "56 tokens fit into the credit of 300, the next 100 do not"
    assert queue.workers[b"a"].n_tokens == 292


def test_a_released_prompt_counts_again() -> None:
    """Fails if the credit is not zero again after all replies, or a prompt that a worker had long ago costs nothing."""
    queue = make_queue(a=hello(1000, prefix_block=BLOCK))
    submit(queue, (1, 100, 30))
    submit(queue, (1, 100, 30))
    first, second = (job for _, job in queue.assign())
    assert queue.workers[b"a"].n_tokens == 130 + 46
    queue.complete(b"a", first.job_id)
    submit(queue, (1, 100, 30))
    ((_, third),) = queue.assign()
    assert queue.workers[b"a"].n_tokens == 46 + 46
    for job in (second, third):
        queue.complete(b"a", job.job_id)
    assert queue.workers[b"a"].n_tokens == 0 and not queue.workers[b"a"].prompts
    submit(queue, (1, 100, 30))
    assert workers_of(queue) == [b"a"] and queue.workers[b"a"].n_tokens == 130


def test_a_prompt_goes_to_its_worker_but_does_not_wait_for_it() -> None:
    """Fails if siblings are spread over the workers while their own has credit, or wait while another one has."""
    queue = two_workers(200, prefix_block=BLOCK)
    submit(queue, (1, 100, 10))
    ((first, job),) = queue.assign()
    other = b"b" if first == b"a" else b"a"
    submit(queue, (2, 20, 10))
    assert workers_of(queue) == [other], "a new prompt goes to the worker with fewer tokens"
    submit(queue, (1, 100, 30))
    submit(queue, (1, 100, 30))
    submit(queue, (1, 100, 30))
    (worker, second), (another, _) = queue.assign()
    assert [worker, another] == [first, other], "110 + 46 + 46 is more than its credit; the third waits for any"
    queue.complete(first, job.job_id)
    queue.complete(first, second.job_id)
    assert workers_of(queue) == [first], "the other one, which had the prompt last, has no credit left"


def test_a_prompt_does_not_leave_other_workers_without_work() -> None:
    """Fails if requests of several prompts, each with a prompt of the one before, all go to one worker."""
    queue = two_workers(4000, prefix_block=BLOCK)
    for prompt in range(10):
        submit(queue, (prompt, 100, 200), (prompt + 1, 100, 200))
    assert workers_of(queue)[:4] == [b"a", b"a", b"b", b"b"]
    a, b = (queue.workers[name].n_tokens for name in (b"a", b"b"))
    assert abs(a - b) <= 4000 // 4 + 600


def test_most_prompt_tokens_decide() -> None:
    """Fails if a request of several prompts goes to the worker of its shortest one."""
    queue = two_workers(2000, prefix_block=BLOCK)
    submit(queue, (1, 300, 10))
    submit(queue, (2, 90, 10))
    first, other = workers_of(queue)
    assert first != other
    submit(queue, (2, 90, 10), (1, 300, 10), (2, 90, 10), (3, 500, 10))
    assert workers_of(queue) == [first]


def test_a_growing_prompt_stays_at_its_worker() -> None:
    """Fails if each token of a teacher's greedy response goes to another worker, whose cache lacks its prompt."""
    queue = two_workers(2000, prefix_block=BLOCK)
    tokens = {prompt: tokens_of(prompt, 100, 30) for prompt in range(2)}
    seen: dict[int, set[bytes]] = {0: set(), 1: set()}
    for n in range(100, 130):
        for prompt in (n % 2, (n + 1) % 2):
            asked = np.append(tokens[prompt][:n], np.int32(0))
            request = make_request(asked, prompt_length=n)
            queue.submit(b"c", "", request, [], bytes(ID_BYTES), 0, 0.0, prompts_of(request, as_frame(asked)))
        pairs = list(queue.assign())
        for prompt, (worker, job) in zip((n % 2, (n + 1) % 2), pairs, strict=True):
            seen[prompt].add(worker)
            queue.complete(worker, job.job_id)
    assert sorted(map(len, seen.values())) == [1, 1]


def test_engines_that_do_not_share_are_balanced_as_before() -> None:
    """Fails if a prompt is bound to a worker that gains nothing from it, or to a worker of another teacher."""
    queue = two_workers(2000)
    for _ in range(4):
        submit(queue, (1, 100, 10))
    assert sorted(workers_of(queue)) == [b"a", b"a", b"b", b"b"]
    queue.heartbeat(b"m", hello(2000, name="m", teacher="math", prefix_block=BLOCK), 0.0)
    submit(queue, (1, 100, 10), teacher="math")
    assert workers_of(queue) == [b"m"]


def test_the_number_of_remembered_prompts_is_bounded() -> None:
    """Fails if the broker's memory grows with the data set, or it forgets the prompts that are in use."""
    queue = make_queue(max_queue_bytes=1 << 30, a=hello(1 << 30, prefix_block=BLOCK))
    owners, jobs = PromptOwners(), []
    for prompt in range(5000):
        submit(queue, (prompt, 20, 2))
        ((_, job),) = queue.assign()
        jobs.append(job)
        owners.record(job, b"a")
        owners.record(jobs[0], b"a")  # in use all the time
    assert len(owners) == 4096
    assert [owners.preferred(job, {b"a": BLOCK}) for job in (jobs[0], jobs[1], jobs[-1])] == [b"a", None, b"a"]
    assert owners.preferred(jobs[-1], {b"b": BLOCK}) is None
    assert owners.preferred(jobs[-1], {b"a": 20}) is None, "its engine does not share prompts as short as this"
