"""The loop that owns an engine while a stream is open, around a fake engine: what it does when, and how it ends; and
what goes in and out of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from gkd.errors import ClusterError, DataError, WeightSyncError
from gkd.rollout.asked import encode_prompts
from gkd.rollout.chunks import decode_sizes
from gkd.rollout.engine import Sampling, _Request
from gkd.rollout.engine_loop import EngineLoop
from gkd.rollout.stream import least_busy
from gkd.rollout.worker import RolloutWorker
from gkd.types import Prompt, Rollout, VersionSpan

N = 2
SAMPLING = Sampling(N, 1.0, 1.0, 8, seed=0)
PATIENCE_S = 20.0  # of a test, for what would else hang


@dataclass
class Engine:
    """A sequence of prompt i takes i steps, its second sample one more. A step waits while `gate` is closed."""

    gate: threading.Event = field(default_factory=threading.Event)
    steps: int = 0
    fails: Exception | None = None
    threads: set[int] = field(default_factory=set)
    inside: int = 0
    running: list[list[Any]] = field(default_factory=list)  # owner, rollout, steps left
    done: list[tuple[Hashable, Rollout]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def n_running(self) -> int:
        return len(self.running)

    def add(self, owner: Hashable, prompts: Sequence[Prompt], sampling: Sampling, places: Sequence[int]) -> None:
        self.threads.add(threading.get_ident())
        for prompt, place in zip(prompts, places, strict=True):
            if prompt.prompt_id > 10**6:
                raise DataError(f"prompt {prompt.prompt_id} is refused")
            for j in range(sampling.n):
                ids = np.ones(1, np.int32)
                span = (VersionSpan(0, 1, 0),)
                made = Rollout(
                    prompt.prompt_id, place * sampling.n + j, ids, ids, np.zeros(1, np.float32), span, "stop"
                )
                self.running.append([owner, made, prompt.prompt_id + j])

    def step(self) -> None:
        assert self.gate.wait(PATIENCE_S)
        if self.fails:
            raise self.fails
        self.inside += 1
        assert self.inside == 1 and self.running
        self.threads.add(threading.get_ident())
        self.steps += 1
        for item in self.running:
            item[2] -= 1
        self.done += [(owner, made) for owner, made, left in self.running if left <= 0]
        self.running = [item for item in self.running if item[2] > 0]
        self.inside -= 1

    def take(self, owner: Hashable) -> list[Rollout]:
        mine = [made for whose, made in self.done if whose is owner]
        self.done = [(whose, made) for whose, made in self.done if whose is not owner]
        return mine

    def drop(self, owner: Hashable) -> None:
        self.take(owner)
        self.running = [item for item in self.running if item[0] is not owner]

    def settle(self) -> None:
        assert not self.running, "handed over with work in it"


class Case:
    """A loop in a thread of its own, with what came out of it."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.loop = EngineLoop(self.engine, SAMPLING)
        self.chunks: list[list[Rollout]] = []
        self.pool = ThreadPoolExecutor(4)
        self.ended = self.pool.submit(self._run)

    def _run(self) -> None:
        for chunk in self.loop.run():
            self.chunks.append(chunk)

    def beside(self, call: Callable[[], Any]) -> Future[Any]:
        return self.pool.submit(call)


@pytest.fixture
def case() -> Iterator[Case]:
    made = Case()
    try:
        yield made
    finally:
        made.engine.gate.set()
        made.loop.close()
        made.pool.shutdown()


def prompts(*ids: int) -> list[Prompt]:
    return [Prompt(i, np.ones(1, np.int32)) for i in ids]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_prompt_comes_out_when_all_its_samples_are_finished() -> None:
    """Fails if a short prompt waits for a long one, or samples of two prompts are mixed, lost or out of order."""
    engine = Engine()
    loop = EngineLoop(engine, SAMPLING)
    running = loop.run()
    loop.admit(prompts(50, 3), [4, 9])
    assert [r.sample_index for r in next(running)] == [18, 19]
    assert engine.steps == 4
    loop.admit(prompts(1), [2])
    assert [r.sample_index for r in next(running)] == [4, 5]
    assert [r.sample_index for r in next(running)] == [8, 9]
    assert engine.steps == 51
    loop.admit(prompts(0), [0])
    assert [r.sample_index for r in next(running)] == [0, 1]
    running.close()  # type: ignore[attr-defined]


def test_what_is_asked_waits_for_one_step_and_not_for_a_sequence(case: Case) -> None:
    """Fails if new weights wait until the engine is idle, or two threads use it at a time."""
    engine = case.engine
    engine.gate.clear()
    case.loop.admit(prompts(10**6), [0])
    until(lambda: engine.running)
    order: list[tuple[str, int]] = []

    def note(name: str) -> None:
        assert engine.inside == 0
        order.append((name, engine.steps))

    asked = []
    for name in ("a", "b", "c"):
        asked.append(case.beside(lambda name=name: case.loop.call(lambda: note(name))))
        until(lambda: len(case.loop._posted) == len(asked))
    engine.gate.set()
    for one in asked:
        one.result(PATIENCE_S)
    assert [name for name, _ in order] == ["a", "b", "c"]
    assert {steps for _, steps in order} == {1}, "all of them after the step that was under way"
    assert engine.n_running == N and not case.chunks


def test_the_steps_go_on_however_much_is_asked(case: Case) -> None:
    """Fails if an engine that is asked all the time writes nothing."""
    stop = threading.Event()

    def pester() -> None:
        while not stop.is_set():
            case.loop.call(lambda: None)

    pests = [case.beside(pester) for _ in range(3)]
    case.loop.admit(prompts(20), [0])
    until(lambda: case.chunks)
    stop.set()
    for pest in pests:
        pest.result(PATIENCE_S)


def test_an_idle_loop_sleeps(case: Case) -> None:
    """Fails if an engine with nothing to write keeps a core busy."""
    case.loop.call(lambda: None)
    began = case.loop.call(time.thread_time)
    time.sleep(0.3)
    assert case.loop.call(time.thread_time) - began < 0.05
    assert case.engine.steps == 0


def test_generate_beside_the_stream_gets_its_own_as_it_finishes(case: Case) -> None:
    """Fails if an evaluation beside the stream waits for the stream's prompts, or takes or leaves some of them."""
    case.loop.admit(prompts(10**6), [0])
    one = Sampling(1, 0.0, 1.0, 8, seed=0)
    got = [rollout.sample_index for rollout in case.loop.generate(prompts(5, 1, 3), one, [0, 1, 2])]
    assert got == [1, 2, 0]
    case.loop.admit(prompts(2), [1])
    until(lambda: case.chunks)
    assert [r.sample_index for chunk in case.chunks for r in chunk] == [2, 3]

    left = case.loop.generate(prompts(2, 10**6), one, [0, 1])
    assert next(left).prompt_id == 2
    left.close()  # type: ignore[attr-defined]
    until(lambda: case.loop.call(lambda: case.engine.n_running) == N)
    with pytest.raises(DataError, match="refused"):
        list(case.loop.generate(prompts(5, 10**6 + 1), one, [0, 1]))
    until(lambda: case.loop.call(lambda: case.engine.n_running) == N)
    assert not case.ended.done(), "a prompt that is refused beside the stream is not the stream's error"


def test_close_leaves_nothing_in_the_engine(case: Case) -> None:
    """Fails if the next batch shares the engine with what a closed stream has left there."""
    case.loop.admit(prompts(10**6, 10**6), [0, 1])
    guest = case.beside(lambda: list(case.loop.generate(prompts(10**6), SAMPLING, [0])))
    until(lambda: case.loop.call(lambda: case.engine.n_running) == 3 * N)
    case.loop.close()
    case.loop.close()
    assert case.engine.n_running == 0 and not case.engine.done
    case.ended.result(PATIENCE_S)
    with pytest.raises(ClusterError, match="closed"):
        guest.result(PATIENCE_S)
    for use in (lambda: case.loop.admit(prompts(1), [5]), lambda: case.loop.call(lambda: None)):
        with pytest.raises(ClusterError, match="closed"):
            use()


def test_a_stream_that_was_never_run_can_be_closed() -> None:
    """Fails if a stream that opened on some engines only keeps the others waiting."""
    engine = Engine()
    loop = EngineLoop(engine, SAMPLING)
    loop.admit(prompts(1), [0])
    loop.close()
    assert list(loop.run()) == [] and engine.steps == 0


def test_a_failed_step_ends_everything_with_its_error(case: Case) -> None:
    """Fails if anyone waits for ever for an engine that has failed, or is told something else."""
    case.engine.gate.clear()
    case.loop.admit(prompts(10**6), [0])
    until(lambda: case.engine.running)
    waiting = [
        case.beside(lambda: case.loop.call(lambda: None)),
        case.beside(lambda: list(case.loop.generate(prompts(1), SAMPLING, [0]))),
    ]
    until(lambda: len(case.loop._posted) == 2)
    case.engine.fails = RuntimeError("no memory")
    case.engine.gate.set()
    for one in (case.ended, *waiting):
        with pytest.raises(RuntimeError, match="no memory"):
            one.result(PATIENCE_S)
    with pytest.raises(RuntimeError, match="no memory"):
        case.loop.call(lambda: None)
    assert case.engine.n_running == 0
    case.loop.close()


def test_a_guest_that_waits_for_its_answers_hears_of_a_failed_step(case: Case) -> None:
    """Fails if an evaluation hangs when the engine fails in the middle of it."""
    guest = case.beside(lambda: list(case.loop.generate(prompts(10**6), SAMPLING, [0])))
    until(lambda: case.engine.steps > 3)
    case.engine.fails = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        guest.result(PATIENCE_S)


def test_only_what_is_vital_ends_the_stream(case: Case) -> None:
    """Fails if a failed question stops the run, or an engine with half of the new weights writes on."""

    def fail() -> None:
        raise WeightSyncError("a tensor is missing")

    case.loop.admit(prompts(10**6), [0])
    with pytest.raises(WeightSyncError):
        case.loop.call(fail)
    assert not case.ended.done()
    with pytest.raises(WeightSyncError):
        case.loop.call(fail, vital=True)
    with pytest.raises(WeightSyncError):
        case.ended.result(PATIENCE_S)


def test_a_refused_prompt_comes_out_of_the_stream(case: Case) -> None:
    """Fails if a prompt that the engine refuses is waited for for ever."""
    case.loop.admit(prompts(3, 10**6 + 1), [0, 1])
    with pytest.raises(DataError, match="prompt 1000001"):
        case.ended.result(PATIENCE_S)


def test_a_reader_that_goes_away_ends_the_stream() -> None:
    """Fails if an engine goes on writing for a stream that nobody reads."""
    engine = Engine()
    loop = EngineLoop(engine, SAMPLING)
    loop.admit(prompts(1, 10**6), [0, 1])
    running = loop.run()
    assert next(running)[0].prompt_id == 1
    running.close()  # type: ignore[attr-defined]
    assert engine.n_running == 0
    with pytest.raises(ClusterError, match="closed"):
        loop.admit(prompts(1), [2])


def test_a_streamed_prompt_leaves_as_its_rollouts_and_their_sizes() -> None:
    """Fails if the driver gets a chunk of another group, or more of it than its sizes; or an engine has two streams."""
    worker = RolloutWorker(3)
    worker._engine = Engine()  # type: ignore[assignment]
    for use in (lambda: worker.admit(b""), lambda: next(iter(worker.stream(2)))):
        with pytest.raises(ClusterError, match="rollout engine 3 has no open stream"):
            use()
    worker.open_stream(SAMPLING)
    with pytest.raises(ClusterError, match="one at a time"):
        worker.open_stream(SAMPLING)
    worker.admit(encode_prompts(prompts(4, 1), [6, 9]))
    items: Any = worker.stream(4)
    for place in (9, 6):
        rollouts, sizes = next(items), next(items)
        assert isinstance(sizes, bytes) and len(sizes) == 40 + 8 * N
        chunk = decode_sizes(sizes, rollouts)
        assert (chunk.dp_rank, chunk.policy_version) == (place % 4, 0)
        assert chunk.sample_index.tolist() == [place * N, place * N + 1] == [r.sample_index for r in chunk.ref]
    with pytest.raises(DataError, match="are not 3 bytes"):
        worker.admit(b"abc")
    items.close()
    worker.close_stream()
    worker.close_stream()
    worker.open_stream(SAMPLING)
    worker.close_stream()


def test_spans_say_which_version_wrote_which_tokens() -> None:
    """Fails if a version that wrote nothing of a sequence is counted as stale, or one that was pushed twice as two."""
    request = _Request("owner", prompts(0)[0], 0, "id")
    for stop, version in ((0, 1), (3, 2), (3, 3), (5, 4), (7, 4), (8, 6)):
        request.written(stop, version)
    assert request.spans == [VersionSpan(0, 3, 2), VersionSpan(3, 7, 4), VersionSpan(7, 8, 6)]


def test_a_prompt_goes_to_the_least_busy_engine() -> None:
    """Fails if engines idle while others queue, or the same run gives its prompts to other engines."""
    assert least_busy(5, [0, 0]) == [0, 1, 0, 1, 0]
    assert least_busy(4, [3, 0, 2]) == [1, 1, 1, 2]
    assert least_busy(0, [1]) == []
