"""Order of the prompts that wait for an engine."""

from __future__ import annotations

import random

import numpy as np

from gkd.rollout.driver.dispatcher import JobStream, Lane, PromptQueue, Waiting
from gkd.rollout.messages import Job, Sampling
from gkd.types import Prompt

N_GROUPS = 4


class Owner:
    def admit(self, stream: JobStream, prompts: object) -> None:
        raise AssertionError("the test fills the queue itself")

    def waiting(self, stream: JobStream) -> list[int]:
        raise AssertionError("the test asks the queue itself")

    def end(self, stream: JobStream) -> None:
        raise AssertionError("the test ends no job")


def job(number: int) -> JobStream:
    return JobStream(Owner(), Job(number, Sampling(1, 1.0, 1.0, 8, seed=0), 0.0), first=False)


def prompts(stream: JobStream, *indices: int) -> list[Waiting]:
    return [Waiting(stream, Prompt(i, np.ones(1, np.int32)), i, 1) for i in indices]


def taken(queue: PromptQueue, n: int, lane: Lane | None = None) -> list[int]:
    """Take n prompts for one engine, and return their indices."""
    indices = []
    for _ in range(n):
        lane, prompt = queue.take(lane)
        assert lane == (prompt.stream.job.id, prompt.index % N_GROUPS)
        indices.append(prompt.index)
    return indices


def test_an_engine_goes_on_with_its_group_inside_the_window() -> None:
    """Fails if an engine's chunks are of many groups, or a prompt is overtaken from outside of the window."""
    queue = PromptQueue(N_GROUPS, window=9)
    queue.append(prompts(job(1), *range(20)))
    # 0, 4 and 8 stand 0, 3 and 6 places behind the first; then 12 stands 11 places behind 1, and so on.
    assert taken(queue, 7) == [0, 4, 8, 1, 5, 9, 2]
    assert taken(queue, 2, (1, 3)) == [3, 7]
    assert len(queue) == 11


def test_without_a_window_prompts_are_taken_in_order() -> None:
    """Fails if small batches are not first in, first out."""
    queue = PromptQueue(N_GROUPS, window=0)
    queue.append(prompts(job(1), *range(9)))
    assert taken(queue, 9) == list(range(9))
    assert len(queue) == 0


def test_no_prompt_is_lost_repeated_or_overtaken_from_outside_of_the_window() -> None:
    """Fails if any sequence of admissions and takes of several engines breaks one of these."""
    rng = random.Random(0)
    window, stream = 13, job(1)
    queue, waiting, lanes, end = PromptQueue(N_GROUPS, window), list[int](), [None] * 3, 0
    for _ in range(3000):
        if rng.random() < 0.2:
            n = rng.randrange(12)
            queue.append(prompts(stream, *range(end, end + n)))
            waiting += range(end, end + n)
            end += n
        elif waiting:
            engine = rng.randrange(3)
            lanes[engine], prompt = queue.take(lanes[engine])  # type: ignore[call-overload]
            assert prompt.index < waiting[0] + window
            waiting.remove(prompt.index)
        assert len(queue) == len(waiting)
    assert sorted(taken(queue, len(waiting))) == waiting


def test_prepended_prompts_go_before_all_others() -> None:
    """Fails if an evaluation, or the prompts of an engine that died, wait behind an engine's own group."""
    queue, stream, batch = PromptQueue(N_GROUPS, window=100), job(1), job(2)
    queue.append(prompts(stream, *range(8)))
    queue.prepend(prompts(batch, 0, 1))
    assert taken(queue, 3, (1, 2)) == [0, 1, 0]
    queue.prepend(prompts(stream, 0))
    assert taken(queue, 3, (1, 1)) == [0, 4, 1]


def test_a_job_that_has_ended_leaves_nothing() -> None:
    """Fails if an engine gets a prompt of a closed stream."""
    queue, stream, batch = PromptQueue(N_GROUPS, window=100), job(1), job(2)
    queue.append(prompts(stream, *range(8)))
    queue.append(prompts(batch, *range(4)))
    queue.drop(stream)
    assert len(queue) == 4
    assert taken(queue, 4, (1, 0)) == [0, 1, 2, 3]


def test_prompts_that_are_partly_answered_have_been_started() -> None:
    """Fails if a prompt of a dead engine, some samples of which have old weights, counts as not started."""
    queue = PromptQueue(N_GROUPS, window=0)
    mine = JobStream(Owner(), Job(1, Sampling(2, 1.0, 1.0, 8, seed=0), 0.0), first=False)
    rows = [Waiting(mine, Prompt(i, np.ones(1, np.int32)), i, missing) for i, missing in enumerate((3, 2, 3, 1))]
    queue.append(rows)
    queue.append(prompts(job(2), 7))
    assert sorted(queue.unanswered(mine)) == [0, 2]
    queue.take(None)
    assert queue.unanswered(mine) == [2]
