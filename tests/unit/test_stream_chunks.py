"""Chunks of a stream: complete prompts, parts of chunks, and samples that an engine returns twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.data.chunks import CHUNK_SIZE, chunk_size, reserve_size
from gkd.pipeline.streaming import StreamChunks
from gkd.rollout.driver.dispatcher import JobStream, Waiting, take_missing
from gkd.rollout.engine.loop import Coalescer
from gkd.rollout.messages import Job, Sampling
from gkd.types import PendingScores, Prompt, Rollout, VersionSpan
from tests.rollout_chunks import chunk_of

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


def test_a_large_batch_of_one_engine_has_few_chunks() -> None:
    """Fails if the driver's work for a batch grows with each sequence: it has a constant cost per chunk."""
    sizes = [chunk_size(config_of(n, 1, 64)) for n in (16, 128, 1024, 2048, 65536)]
    assert sizes == [16, 16, 128, 256, 256]


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


class Owner:
    def admit(self, stream: JobStream, prompts: object) -> None:
        raise AssertionError("nothing is admitted")

    def end(self, stream: JobStream) -> None:
        raise AssertionError("nothing ends")


@pytest.mark.parametrize("n", [3, 200])
def test_samples_that_were_returned_before_are_left_out(n: int) -> None:
    """Fails if a sample that an engine returned before it died is trained on twice, or a missing one is left out."""
    stream = JobStream(Owner(), Job(7, Sampling(n, 1.0, 1.0, 8, seed=0), 0.0), first=False)
    prompt = Prompt(0, np.ones(1, np.int32))
    half, whole = Waiting(stream, prompt, 2, (1 << n) - 1 - 2), Waiting(stream, prompt, 4, (1 << n) - 1)
    held = {waiting.key: waiting for waiting in (half, whole)}
    first = np.array([2 * n + 1, 4 * n + 1, 2 * n, 5 * n], np.int32)  # first: returned before; last: of no prompt
    assert take_missing(held, stream.job, first).tolist() == [1, 2]
    rest = [i for i in range(n) if i > 1]
    samples = np.array([2 * n + i for i in rest] + [4 * n + i for i in rest], np.int32)
    assert take_missing(held, stream.job, samples).tolist() == list(range(len(samples)))
    assert list(held) == [whole.key] and whole.missing == 1
    assert take_missing(held, stream.job, np.array([4 * n], np.int32)).tolist() == [0]
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
