"""Assign prompts to engines by pull: real dispatcher, workers and engine loops around engines that only count steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Set
from functools import partial
from typing import Any

import numpy as np
import pytest

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import ClusterError, DataError, RankFailed
from gkd.rollout.driver.dispatcher import JobStream
from gkd.rollout.driver.pool import RolloutPool
from gkd.types import Prompt, Rollout, RolloutChunk
from tests.processes import wait_until
from tests.unit.local_ray import Method, worker_of
from tests.unit.step_engine import Engine as StepEngine

pytestmark = pytest.mark.usefixtures("local_ray")
N, N_GROUPS, SLOTS = 2, 2, 4


class Engine(StepEngine):
    """A sequence of prompt i takes 1 + i % 5 steps of `pace_s`. Dies after `dies_at` steps."""

    def __init__(self, pace_s: float, dies_at: int | None) -> None:
        super().__init__(SLOTS, lambda prompt_id, j: 1 + prompt_id % 5)
        self.pace_s, self.dies_at = pace_s, dies_at
        self.may_step: Callable[[], bool] | None = None

    def step(self) -> None:
        time.sleep(self.pace_s)
        if self.may_step is not None:
            wait_until(self.may_step, 20.0, "leave to make a step")
        if self.steps == self.dies_at:
            raise RankFailed("the process died")
        super().step()

    @property
    def n_prompts(self) -> int:
        """The number of prompts that have been started."""
        return len(self.started) // N


class Handle:
    """Handle of a real `RolloutWorker`."""

    stream: Method

    def __init__(self, config: Config, pace_s: float = 0.001, dies_at: int | None = None) -> None:
        self.engine = Engine(pace_s, dies_at)
        worker = worker_of(self.engine, config)
        self.n_calls = 0
        for name in ("open_stream", "close_stream", "admit", "stream", "waiting"):
            setattr(self, name, Method(partial(self._call, getattr(worker, name))))
        self.close = Method(lambda: None)  # it removes files of vLLM

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.n_calls += 1
        return function(*args)


def settings(*overrides: str) -> Config:
    own = [f"rollout.max_num_seqs={SLOTS}", f"rollout.n={N}", "trainer.stage_timeout_s=10"]
    return load_config(None, [*own, *overrides])


def prompts(n: int) -> list[Prompt]:
    return [Prompt(i, np.array([i], np.int32)) for i in range(n)]


def generate(pool: RolloutPool, n_prompts: int) -> dict[int, list[int]]:
    """Return the tokens by sample index; each sample comes once, in a chunk of its group."""
    answers: dict[int, list[int]] = {}
    for chunk in pool.generate(prompts(n_prompts), prompt_indices=range(n_prompts), n=N, temperature=1.0, seed=0):
        for rollout in rollouts_of(chunk):
            assert rollout.sample_index not in answers and rollout.sample_index // N % N_GROUPS == chunk.dp_rank
            answers[rollout.sample_index] = rollout.response_ids.tolist()
    return answers


def rollouts_of(chunk: RolloutChunk) -> Iterator[Rollout]:
    listed: list[Rollout] = chunk.ref
    places = range(len(listed)) if chunk.sequence_indices is None else chunk.sequence_indices.tolist()
    rollouts = [listed[i] for i in places]
    assert chunk.sample_index.tolist() == [r.sample_index for r in rollouts]
    yield from rollouts


@pytest.mark.parametrize("n_engines", [1, 2, 3])
def test_any_number_of_engines_answers_each_prompt_once(n_engines: int) -> None:
    """Fails if a sample is lost, repeated, or in another group's chunk, or a second batch finds an engine occupied."""
    config = settings()
    handles = [Handle(config) for i in range(n_engines)]
    pool = RolloutPool(handles, config, N_GROUPS)
    for n_prompts in (40, 3):
        assert generate(pool, n_prompts) == {i * N + j: [i, j] for i in range(n_prompts) for j in range(N)}
    assert all(handle.engine.started and not handle.engine.running for handle in handles)


@pytest.mark.parametrize("n_engines", [1, 2, 3])
def test_an_evaluation_does_not_depend_on_the_number_of_engines(n_engines: int) -> None:
    """Fails if the index of a prompt, from which its environment's seed is derived, is its place in an engine's share,
    or the returned responses are others than the first.
    """

    class Asked(Engine):
        def generate(self, prompts: Any, sampling: Any, prompt_indices: Any) -> Iterator[Rollout]:
            for prompt, index in zip(prompts, prompt_indices, strict=True):
                asked.append((prompt.prompt_id, index))
                ids = np.array([prompt.prompt_id], np.int32)
                yield Rollout(prompt.prompt_id, index, ids, ids, np.zeros(1, np.float32), (), "stop")

    asked: list[tuple[int, int]] = []
    config = settings("eval.answer_marker=####")
    tokenizer = type("Tokenizer", (), {"decode": lambda self, ids, **_: f"#### {int(ids[-1])}"})()
    engines = [worker_of(Asked(0.0, None), config, tokenizer=tokenizer) for _ in range(n_engines)]
    handles = [type("Handle", (), {"greedy": Method(engine.greedy)})() for engine in engines]
    rows = [Prompt(10 + i, np.array([10 + i], np.int32), answer=str(10 + i % 5)) for i in range(7)]
    report = RolloutPool(handles, config, N_GROUPS).greedy(rows, n_samples=4)
    assert sorted(asked) == [(10 + i, i) for i in range(7)]
    assert [sample.prompt_id for sample in report.samples] == [10, 11, 12, 13] and report.accuracy == 5 / 7


def test_a_slow_engine_gets_fewer_prompts() -> None:
    """Fails if prompts are dealt by place: the slow engine makes its first step after the other has most prompts."""
    config = settings("trainer.global_batch_size=8")
    fast, slow = Handle(config), Handle(config)
    slow.engine.may_step = lambda: fast.engine.n_prompts >= 160
    assert len(generate(RolloutPool([fast, slow], config, N_GROUPS), 200)) == 200 * N
    assert slow.engine.n_prompts <= 40


def test_the_prompts_of_a_dead_engine_are_answered_by_the_others() -> None:
    """Fails if a prompt of an engine that died is lost, or a sample that it had returned is returned again."""
    config = settings("rollout.max_restarts=1")
    dead, healthy = Handle(config, dies_at=5), Handle(config)
    again = Handle(config)
    pool = RolloutPool([dead, healthy], config, N_GROUPS)
    may_start = threading.Event()

    class Slots:
        def start(self, index: int, attempt: int) -> Any:
            assert (index, attempt) == (0, 1) and may_start.wait(30)
            return again

        def close(self, indices: Set[int]) -> None:
            pass

        def card(self, index: int) -> str:
            return "a card"

    pool.engines.recover_with(Slots(), lambda index, worker: 0)
    assert len(generate(pool, 40)) == 40 * N
    assert dead.engine.started and not again.engine.started and healthy.engine.n_prompts >= 20
    stream = pool.open_stream(n=N, temperature=1.0, seed=0)
    stream.admit(prompts(300), prompt_indices=range(300))
    may_start.set()
    assert take(stream, 300 * N) == list(range(300 * N))
    stream.close()
    assert again.engine.started, "it joined the open stream"


@pytest.mark.parametrize("n_items", [0, 1])
def test_a_stream_that_ends_too_early_ends_the_job(n_items: int) -> None:
    """Fails if the prompts of an engine that ends its stream, or the sequences without their sizes, are waited for."""
    config = settings()
    handle = Handle(config)
    handle.stream = Method(lambda: iter([[]] * n_items))
    with pytest.raises(ClusterError) as caught:
        generate(RolloutPool([handle], config, N_GROUPS), 3)
    assert type(caught.value) is ClusterError and "rollout engine 0" in str(caught.value)


def take(stream: JobStream, n: int) -> list[int]:
    seen: list[int] = []
    while len(seen) < n:
        chunks = stream.finished(10.0)
        assert chunks
        seen += [r.sample_index for chunk in chunks for r in rollouts_of(chunk)]
    return sorted(seen)


def test_a_batch_does_not_wait_for_the_prompts_of_a_stream() -> None:
    """Fails if an evaluation during a stream waits for all its prompts, or gets its chunks."""
    config = settings()
    pool = RolloutPool([Handle(config) for i in range(2)], config, N_GROUPS)
    stream = pool.open_stream(n=N, temperature=1.0, seed=0)
    with pytest.raises(ClusterError):
        pool.open_stream(n=N, temperature=1.0, seed=0)
    stream.admit(prompts(500), prompt_indices=range(500))
    assert len(generate(pool, 6)) == 6 * N
    before = sum(chunk.n_sequences for chunk in stream.finished(0.0))
    assert before < 250 * N
    stream.close()
    assert stream.finished() == []
    with pytest.raises(ClusterError):
        stream.admit(prompts(1), prompt_indices=[0])
    assert len(generate(pool, 4)) == 4 * N


@pytest.mark.parametrize("n_engines", [1, 2])
def test_prompts_that_no_engine_has_started_are_known(n_engines: int) -> None:
    """Fails if a prompt that will be generated by newer weights counts as started, or a started one does not."""
    config = settings()
    handles, may_step = [Handle(config) for i in range(n_engines)], threading.Event()
    for handle in handles:
        handle.engine.may_step = may_step.is_set  # each starts what fits, and then waits in a step
    pool = RolloutPool(handles, config, N_GROUPS)
    stream = pool.open_stream(n=N, temperature=1.0, seed=0)
    assert stream.waiting() == []
    stream.admit(prompts(40), prompt_indices=range(40))
    n_started = n_engines * SLOTS // N
    wait_until(lambda: sum(handle.engine.n_prompts for handle in handles) == n_started, 30.0, "the first prompts")
    started = {prompt for handle in handles for _, prompt in handle.engine.started}
    assert sorted(stream.waiting()) == sorted(set(range(40)) - started) and len(started) == n_started
    may_step.set()
    stream.close()


def test_a_reader_without_a_time_limit_is_woken_by_close() -> None:
    """Fails if the thread that reads a stream has to poll, or never ends."""
    config = settings()
    pool = RolloutPool([Handle(config)], config, N_GROUPS)
    stream = pool.open_stream(n=N, temperature=1.0, seed=0)
    results: list[list[RolloutChunk]] = []
    reader = threading.Thread(target=lambda: results.append(stream.finished()))
    reader.start()
    stream.close()
    reader.join(30)
    assert results == [[]] and not reader.is_alive()


def test_engines_get_no_call_behind_their_end() -> None:
    """Fails if a thread that generates in an interrupted run waits on, or calls an engine while Ray stops.

    Ray ends such a process with exit code 1, before it has removed anything.
    """
    config = settings()
    handles = [Handle(config, pace_s=0.01) for i in range(2)]
    pool = RolloutPool(handles, config, N_GROUPS)
    stream = pool.open_stream(n=N, temperature=1.0, seed=0)
    stream.admit(prompts(40), prompt_indices=range(40))
    batch = pool.generate(prompts(40), prompt_indices=range(40), n=N, temperature=1.0, seed=0)
    next(batch)
    pool.close()
    assert not any(thread.name.startswith("read ") for thread in threading.enumerate()), "they call Ray, too"
    n_calls = [handle.n_calls for handle in handles]
    for ends in (lambda: list(batch), lambda: take(stream, 40 * N)):
        with pytest.raises(ClusterError):
            ends()
    stream.waiting()
    stream.close()
    wait_until(lambda: not any(handle.engine.running for handle in handles), 30.0, "the end of what was started")
    assert n_calls == [handle.n_calls for handle in handles]


def test_every_job_gets_the_error_of_a_refused_prompt() -> None:
    """Fails if a batch waits for an engine whose stream has ended with an error, or the next stream has it, too."""
    config = settings()
    pool = RolloutPool([Handle(config) for i in range(2)], config, N_GROUPS)
    stream = pool.open_stream(n=N, temperature=1.0, seed=0)
    stream.admit([Prompt(10**6 + 1, np.ones(1, np.int32))], prompt_indices=[0])
    for _ in range(2):
        with pytest.raises(DataError):
            stream.finished(10.0)
    stream.close()
    assert len(generate(pool, 4)) == 4 * N
