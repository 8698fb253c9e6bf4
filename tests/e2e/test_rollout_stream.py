"""The rollout stream through real pools: three engines, one trainer rank, weight syncs during generation."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import ray

from gkd.actor import worker as actor_worker
from gkd.actor.pool import ActorPool
from gkd.actor.worker import ActorWorker
from gkd.cluster.calls import gather
from gkd.cluster.cluster import Cluster
from gkd.cluster.placement import PoolSpec
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import ClusterError, DataError
from gkd.roles import RolloutStream
from gkd.rollout.driver.pool import RolloutPool
from gkd.rollout.engine import worker as rollout_worker
from gkd.rollout.engine.worker import RolloutWorker
from gkd.start.worker_env import worker_env
from gkd.types import Prompt, Rollout, RolloutChunk, ScoredChunk, TeacherScores, TeacherTopK
from gkd.weight_sync.coordinator import WeightSync
from tests.bench.driver_bytes import counted
from tests.e2e.conftest import EOS, VOCAB, Lab
from tests.e2e.test_driver_bytes import LIMIT
from tests.processes import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
DP_SIZE = 3  # number of data-parallel groups
N, MAX_TOKENS = 2, 48
N_FIRST, N_ALL = 120, 140  # prompts admitted before and after the concurrent evaluation


@dataclass
class Pools:
    rollout: RolloutPool
    actor: ActorPool
    sync: WeightSync
    config: Config


@pytest.fixture(scope="module")
def pools(lab: Lab) -> Iterator[Pools]:
    settings = lab.command(lab.root / "stream_run", 1)[5:]
    config = load_config(
        None,
        [
            *settings,
            f"data.max_response_length={MAX_TOKENS}",
            "rollout.n_gpus_per_node=3",
            "rollout.max_num_seqs=8",
            "weight_sync.verify=always",
        ],
    )
    cluster = Cluster("", n_slots=4, on_cpu=True)
    try:
        specs = [PoolSpec("actor", 1, 1, gpus_per_worker=1), PoolSpec("rollout", 1, 3, gpus_per_worker=1)]
        slots = cluster.make_pools(specs, 60)
        env = worker_env(on_cpu=True)
        actor = ActorPool(
            slots["actor"].spawn(ActorWorker, env, concurrency_groups=actor_worker.CONCURRENCY_GROUPS), config
        )
        engines = slots["rollout"].spawn(RolloutWorker, env, concurrency_groups=rollout_worker.CONCURRENCY_GROUPS)
        rollout = RolloutPool(engines, config, DP_SIZE)
        gather(rollout.init_model("cpu", [EOS]) | actor.init_model("cpu", 4, 200), "init_model", 200)
        yield Pools(rollout, actor, WeightSync(actor.exporters(), rollout.workers, config, "cpu", 200), config)
    finally:
        cluster.close()


def _prompts(n: int) -> list[Prompt]:
    rng = np.random.default_rng(5)
    return [Prompt(i, rng.integers(2, VOCAB, 3 + i % 9).astype(np.int32), "w2") for i in range(n)]


class Reader:
    """Read a stream in a thread, as the trainer does; `until` raises the thread's error."""

    def __init__(self, stream: RolloutStream) -> None:
        self.chunks: list[RolloutChunk] = []
        self._stream = stream
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(self._read)

    def _read(self) -> None:
        while chunks := self._stream.finished():
            self.chunks += chunks

    @property
    def n_sequences(self) -> int:
        return sum(chunk.n_sequences for chunk in self.chunks)

    def until(self, n: int) -> list[RolloutChunk]:
        """Wait for n sequences."""
        wait_until(lambda: self.n_sequences >= n or self._done.done(), 100.0, f"{n} sequences")
        if self._done.done():
            self._done.result()
        return self.chunks

    def stop(self) -> None:
        """Return when the stream has ended; it was closed."""
        self._pool.shutdown()


def _scored(chunk: RolloutChunk) -> ScoredChunk:
    """Return the chunk with scores of a teacher that puts its mass on four tokens."""
    scores = []
    for rollout in ray.get(chunk.ref):
        shape = (len(rollout.response_ids), 4)
        ids = np.broadcast_to(np.arange(5, 9, dtype=np.int32), shape).copy()
        logprobs = np.full(shape, np.log(0.2), np.float32)
        scores.append(TeacherScores(TeacherTopK(ids, logprobs, np.full(shape[0], 0.2, np.float32))))
    return ScoredChunk(chunk, ray.put(scores), 0.8, 0)


def test_weights_are_synced_while_the_stream_generates(pools: Pools) -> None:
    """Fails if a weight sync, an evaluation or a batch waits for the stream or breaks it, if a prompt is lost, repeated
    or assigned to another group, or if the driver receives more than sizes."""
    prompts = _prompts(N_ALL)
    with counted() as counters:
        stream = pools.rollout.open_stream(n=N, temperature=1.0, seed=5)
        with pytest.raises(ClusterError):
            pools.rollout.open_stream(n=N, temperature=1.0, seed=5)
        reader = Reader(stream)
        try:
            for start in range(0, N_FIRST, 4):
                stream.admit(prompts[start : start + 4], prompt_indices=range(start, start + 4))
            first = list(reader.until(6))
            pools.actor.train_step([_scored(replace(chunk, dp_rank=0)) for chunk in first])
            report = pools.sync.push(1)
            at_push = reader.n_sequences
            greedy = pools.rollout.greedy(prompts[:5], n_samples=2)
            batch = list(pools.rollout.generate(prompts[:4], prompt_indices=range(4), n=1, temperature=0.0, seed=0))
            at_end = reader.n_sequences
            before = counters.look()
            stream.admit(prompts[N_FIRST:], prompt_indices=range(N_FIRST, N_ALL))
            chunks = list(reader.until(N * N_ALL))
            after = counters.look()
        finally:
            stream.close()
            reader.stop()
    print(f"{at_push} of {N * N_FIRST} sequences were finished after the push, {at_end} after greedy and generate")
    grown = {name: (after[name] - before[name]) / (N * N_ALL - at_end) for name in after}
    print(f"{N * N_ALL - at_end} sequences in {len(chunks)} chunks in all, bytes per sequence: {grown}")
    assert grown["read_bytes"] + grown["written_bytes"] <= LIMIT
    assert at_push < 30 * N and at_end < 100 * N and report.verified_tensors == 24
    assert len(greedy.samples) == 2
    assert sorted(i for chunk in chunks for i in chunk.sample_index.tolist()) == list(range(N * N_ALL))
    assert len(chunks) < N * N_ALL / 2, "finished sequences are coalesced"
    rollouts: dict[int, Rollout] = {}
    for chunk in chunks:
        assert {i // N % DP_SIZE for i in chunk.sample_index.tolist()} == {chunk.dp_rank}
        mine: list[Rollout] = ray.get(chunk.ref)
        assert chunk.versions.tolist() == [r.policy_version for r in mine]
        assert chunk.sample_index.tolist() == [r.sample_index for r in mine]
        for rollout in mine:
            assert rollout.prompt_ids.tolist() == prompts[rollout.sample_index // N].token_ids.tolist()
            assert rollout.version_spans[-1].stop == len(rollout.response_ids)
            rollouts[rollout.sample_index] = rollout
    spans = [tuple(s.policy_version for s in r.version_spans) for r in rollouts.values()]
    assert {(0,), (0, 1), (1,)} == set(spans)
    assert [v for chunk in batch for v in chunk.versions.tolist()] == [1] * 4
    (one,) = (r for chunk in batch for r in ray.get(chunk.ref) if r.prompt_id == 0)
    assert one.response_ids.tolist() == greedy.samples[0].response_ids


def test_a_closed_stream_leaves_no_work_in_the_engines(pools: Pools) -> None:
    """Fails if a closed stream's prompts are generated later, or a stream can only be opened once."""
    prompts = _prompts(40)
    stream = pools.rollout.open_stream(n=N, temperature=1.0, seed=5)
    stream.admit(prompts, prompt_indices=range(40))
    stream.close()
    stream.close()
    assert stream.finished(5.0) == []
    with pytest.raises(ClusterError):
        stream.admit(prompts, prompt_indices=range(40))
    generated = list(pools.rollout.generate(prompts[7:8], prompt_indices=[7], n=N, temperature=1.0, seed=5))

    stream = pools.rollout.open_stream(n=N, temperature=1.0, seed=5)
    assert stream.finished(0.1) == []
    stream.admit(prompts[7:8], prompt_indices=[7])
    streamed = Reader(stream).until(N)
    stream.close()
    one, other = (
        sorted((r for chunk in chunks for r in ray.get(chunk.ref)), key=lambda r: r.sample_index)
        for chunks in (streamed, generated)
    )
    for a, b in zip(one, other, strict=True):
        assert a.sample_index == b.sample_index and a.response_ids.tolist() == b.response_ids.tolist()
        assert a.rollout_logprobs.tobytes() == b.rollout_logprobs.tobytes()


def test_any_number_of_engines_gives_the_same_tokens(pools: Pools) -> None:
    """Fails if the engine that answers a prompt, or when it gets it, changes the answer."""
    prompts, workers = _prompts(60), pools.rollout.workers
    config = replace(pools.config, rollout=replace(pools.config.rollout, max_num_seqs=8))
    answers = []
    for mine in (workers[:1], workers[:2], workers):
        chunks = RolloutPool(mine, config, DP_SIZE).generate(
            prompts, prompt_indices=range(60), n=N, temperature=1.0, seed=9
        )
        rollouts = sorted((r for chunk in chunks for r in ray.get(chunk.ref)), key=lambda r: r.sample_index)
        assert [r.sample_index for r in rollouts] == list(range(60 * N))
        answers.append([(r.response_ids.tolist(), r.rollout_logprobs.tobytes()) for r in rollouts])
    for other in answers[1:]:
        assert [tokens for tokens, _ in other] == [tokens for tokens, _ in answers[0]]
        print(sum(a != b for (_, a), (_, b) in zip(other, answers[0], strict=True)), "of", 60 * N, "logprobs differ")


def test_a_refused_prompt_and_a_dead_engine_are_named(pools: Pools) -> None:
    """Fails if a run waits forever for a refused prompt or a dead engine."""
    stream = pools.rollout.open_stream(n=N, temperature=1.0, seed=5)
    stream.admit([Prompt(77, np.full(200, 5, np.int32))], prompt_indices=[0])
    with pytest.raises(DataError, match="prompt 77"):
        Reader(stream).until(1)
    stream.close()

    stream = pools.rollout.open_stream(n=N, temperature=1.0, seed=5)
    stream.admit(_prompts(40), prompt_indices=range(40))
    workers: list[Any] = pools.rollout.workers
    ray.kill(workers[1])
    with pytest.raises(ClusterError, match="rollout engine 1"):
        Reader(stream).until(40 * N)
    stream.close()
