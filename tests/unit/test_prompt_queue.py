"""Prompts on their way to engines, and chunks on their way back: order, sizes, complete prompts, repeated samples."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.data.chunks import CHUNK_SIZE, chunk_size, reserve_size
from gkd.pipeline.streaming import StreamChunks
from gkd.rollout.driver.dispatcher import JobStream, Lane, PromptQueue, Waiting, take_missing
from gkd.rollout.engine.loop import Coalescer
from gkd.rollout.messages import Job, Sampling
from gkd.types import PendingScores, Prompt, Rollout, VersionSpan
from tests.rollout_chunks import chunk_of

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
    return [Waiting.of(stream, Prompt(i, np.ones(1, np.int32)), i) for i in indices]


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


@pytest.mark.parametrize("window", [0, 13])  # 0: in order
def test_no_prompt_is_lost_repeated_or_overtaken_from_outside_of_the_window(window: int) -> None:
    """Fails if any sequence of admissions and takes of several engines breaks one of these."""
    rng, stream = random.Random(0), job(1)
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
            assert prompt.index < waiting[0] + max(1, window)
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
    missing = ({0, 1}, {3}, {4, 5}, {6})
    rows = [Waiting(mine, Prompt(i, np.ones(1, np.int32)), i, samples) for i, samples in enumerate(missing)]
    queue.append(rows)
    queue.append(prompts(job(2), 7))
    assert sorted(queue.unanswered(mine)) == [0, 2]
    queue.take(None)
    assert queue.unanswered(mine) == [2]


N = 3


def pending(name: str, samples: list[int], versions: list[int]) -> PendingScores:
    return PendingScores(chunk_of(samples, version=versions, ref=name), name, name)


def parts(chunks: StreamChunks, *positions: int) -> dict[str, list[int]]:
    return {part.ref: part.rollouts.sample_index.tolist() for part in chunks.parts(positions)}


def config_of(n_sequences: int, n_engines: int, max_num_seqs: int) -> Config:
    base = load_config(None, [])
    trainer = replace(base.trainer, global_batch_size=n_sequences)
    return replace(
        base, trainer=trainer, rollout=replace(base.rollout, n_gpus_per_node=n_engines, max_num_seqs=max_num_seqs)
    )


@pytest.mark.parametrize("n", [1, 200, 1024, 1 << 16])
@pytest.mark.parametrize("max_num_seqs", [1, 40, 256, 4096])
def test_an_engine_sends_a_chunk_before_its_reserve_is_used_up(n: int, max_num_seqs: int) -> None:
    """Fails if an engine of several runs out of prompts while the driver waits for its chunk to be full."""
    size = chunk_size(config_of(n, 3, max_num_seqs))
    assert CHUNK_SIZE <= size <= min(reserve_size(max_num_seqs, n, 3), chunk_size(config_of(n, 1, max_num_seqs)))


def test_the_reserve_of_an_engine_is_a_part_of_its_share() -> None:
    """Fails if a batch is dealt to the engines before they start, or chunks of a large batch are small."""
    assert [reserve_size(256, n, 64) for n in (256, 16384, 65536, 1 << 20)] == [128, 128, 256, 256]
    assert [reserve_size(256, n, 64) for n in (40960, 49152)] == [160, 192], "a quarter of 640 and of 768"
    assert reserve_size(4, 1 << 20, 2) == CHUNK_SIZE


def test_chunks_of_short_responses_are_large() -> None:
    """Fails if passing on chunks costs more than computing them, or a batch has a single chunk for each group."""
    base = config_of(128, 1, 64)
    of = {n: replace(base, data=replace(base.data, max_response_length=n)) for n in (16, 32, 64, 1024)}
    assert [chunk_size(config) for config in of.values()] == [64, 64, 32, 16]
    both = replace(of[16], trainer=replace(base.trainer, n_gpus_per_node=2))
    assert chunk_size(both) == 32
    assert chunk_size(replace(of[16], rollout=config_of(128, 3, 40).rollout)) == reserve_size(40, 128, 3)


def test_chunks_of_long_responses_are_small() -> None:
    """Fails if an endpoint must hold gigabytes of scores before the first sequence of a chunk is handed over."""
    base = config_of(65536, 1, 64)
    sizes = [chunk_size(replace(base, data=replace(base.data, max_response_length=n))) for n in (1024, 4096, 1 << 17)]
    assert sizes == [256, 64, 16]


def test_a_prompt_is_complete_with_its_last_sample() -> None:
    """Fails if a prompt is trained on without all samples, with those of others, twice, or as younger than it is."""
    chunks = StreamChunks(N)
    assert list(chunks.add(pending("a", [2, 30, 0], [5, 4, 4]))) == []
    assert list(chunks.add(pending("b", [32, 1, 4, 31], [5, 5, 3, 5]))) == [(0, 4), (10, 4)]
    assert parts(chunks, 0) == {"a": [2, 0], "b": [1]}
    assert parts(chunks, 10, 0) == {"a": [2, 30, 0], "b": [32, 1, 31]}
    chunks.remove([0, 10])
    assert list(chunks.add(pending("c", [3, 5], [6, 6]))) == [(1, 3)]
    assert parts(chunks, 1) == {"b": [4], "c": [3, 5]}
    chunks.remove([1])
    assert not chunks._chunks and not chunks._incomplete
    with pytest.raises(KeyError):
        list(chunks.add(pending("d", [6, 7, 8, 6], [6] * 4)))


def test_samples_that_were_returned_before_are_left_out() -> None:
    """Fails if a sample that an engine returned before it died is trained on twice, or a missing one is left out."""
    stream = JobStream(Owner(), Job(7, Sampling(3, 1.0, 1.0, 8, seed=0), 0.0), first=False)
    prompt = Prompt(0, np.ones(1, np.int32))
    half = Waiting(stream, prompt, 2, {6, 8})  # an engine returned sample 7, and died
    whole = Waiting.of(stream, prompt, 4)
    held = {waiting.key: waiting for waiting in (half, whole)}
    assert take_missing(held, stream.job, np.array([7, 13, 6, 15], np.int32)) == [1, 2]  # 15 is of no prompt
    assert take_missing(held, stream.job, np.array([8, 14], np.int32)) == [0, 1]
    assert list(held) == [whole.key]
    assert take_missing(held, stream.job, np.array([12], np.int32)) == [0]
    assert not held


def test_sequences_that_a_step_waits_for_leave_soon() -> None:
    """Fails if a step waits for a late sequence as long as chunks wait for their last ones."""
    chunks, job = Coalescer(1, 9, late_age=2), Job(1, Sampling(1, 1.0, 1.0, 8, seed=0), 0.8)
    nothing = np.zeros(0, np.int32)

    def finish(index: int, now_s: float, *versions: int) -> None:
        spans = tuple(VersionSpan(i, i + 1, version) for i, version in enumerate(versions))
        chunks.add(job, Rollout(index, index, nothing, nothing, nothing, spans, "stop"), now_s)

    def left(now_s: float) -> list[int]:
        return [r.prompt_id for _, _, rollouts in chunks.due(now_s, flush=False) for r in rollouts]

    finish(0, 0.0, 4, 5)
    assert left(0.5) == []
    finish(1, 0.5, 3, 4, 5)
    assert left(0.55) == [] and left(0.6) == [0, 1], "an eighth of 0.8 s after the late one"
    finish(2, 0.7, 3, 5)
    finish(3, 0.71, 5)
    assert left(0.75) == [] and left(0.8) == [2, 3]
