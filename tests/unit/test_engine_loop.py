"""The loop that owns an engine while a stream is open, around a fake engine: what it does when, and how it ends; and
what goes in and out of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.config.schema import Config, RolloutConfig
from gkd.data.chunks import decode_sizes
from gkd.data.prompt_codec import encode_prompts
from gkd.errors import ClusterError, DataError, WeightSyncError
from gkd.rollout.engine_loop import EngineLoop
from gkd.rollout.sampling import Request, Sampling
from gkd.rollout.stream import least_busy
from gkd.rollout.worker import RolloutWorker
from gkd.types import Prompt, Rollout, VersionSpan

N = 2
SAMPLING = Sampling(N, 1.0, 1.0, 8, seed=0)
PATIENCE_S = 20.0  # of a test, for what would else hang
ROOM = 1000  # for whatever a test begins


@dataclass
class Engine:
    """A sequence of prompt i takes i steps, its second sample one more; the first `slots` of those that came move.
    A step, a refusal and `settle` each wait while their gate is closed."""

    slots: int = ROOM
    gate: threading.Event = field(default_factory=threading.Event)
    refusal: threading.Event = field(default_factory=threading.Event)
    settle_gate: threading.Event = field(default_factory=threading.Event)
    settling: threading.Event = field(default_factory=threading.Event)
    fails_in: dict[str, Exception] = field(default_factory=dict)  # "drop" | "settle" -> with what
    begun: list[tuple[int, int]] = field(default_factory=list)  # (steps before it, prompt id) of each sequence
    ended: list[tuple[int, int]] = field(default_factory=list)  # (step, prompt id)
    most: int = 0  # sequences at a time
    steps: int = 0
    fails: Exception | None = None
    threads: set[int] = field(default_factory=set)
    inside: int = 0
    running: list[list[Any]] = field(default_factory=list)  # owner, rollout, steps left
    done: list[tuple[Hashable, Rollout]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for gate in (self.gate, self.refusal, self.settle_gate):
            gate.set()

    @property
    def n_running(self) -> int:
        return len(self.running)

    def add(
        self, owner: Hashable, prompts: Sequence[Prompt], sampling: Sampling, prompt_indices: Sequence[int]
    ) -> None:
        self.threads.add(threading.get_ident())
        for prompt, place in zip(prompts, prompt_indices, strict=True):
            if prompt.prompt_id > 10**6:
                assert self.refusal.wait(PATIENCE_S)
                raise DataError(f"prompt {prompt.prompt_id} is refused")
            for j in range(sampling.n):
                ids = np.ones(1, np.int32)
                span = (VersionSpan(0, 1, 0),)
                made = Rollout(
                    prompt.prompt_id, place * sampling.n + j, ids, ids, np.zeros(1, np.float32), span, "stop"
                )
                self.running.append([owner, made, prompt.prompt_id + j])
                self.begun.append((self.steps, prompt.prompt_id))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Is never asleep."""

    def step(self) -> None:
        assert self.gate.wait(PATIENCE_S)
        if self.fails:
            raise self.fails
        self.inside += 1
        assert self.inside == 1 and self.running
        self.threads.add(threading.get_ident())
        self.steps += 1
        self.most = max(self.most, len(self.running))
        for item in self.running[: self.slots]:
            item[2] -= 1
        self.done += [(owner, made) for owner, made, left in self.running if left <= 0]
        self.ended += [(self.steps, made.prompt_id) for _, made, left in self.running if left <= 0]
        self.running = [item for item in self.running if item[2] > 0]
        self.inside -= 1

    def take(self, owner: Hashable) -> list[Rollout]:
        mine = [made for whose, made in self.done if whose is owner]
        self.done = [(whose, made) for whose, made in self.done if whose is not owner]
        return mine

    def drop(self, owner: Hashable) -> None:
        if "drop" in self.fails_in:
            raise self.fails_in["drop"]
        self.take(owner)
        self.running = [item for item in self.running if item[0] is not owner]

    def settle(self) -> None:
        self.settling.set()
        assert self.settle_gate.wait(PATIENCE_S)
        if "settle" in self.fails_in:
            raise self.fails_in["settle"]
        assert not self.running, "handed over with work in it"


class Case:
    """A loop in a thread of its own, with what came out of it."""

    def __init__(self, max_running: int = ROOM) -> None:
        self.engine = Engine(slots=max_running)
        self.loop = EngineLoop(self.engine, SAMPLING, max_running)
        self.chunks: list[list[Rollout]] = []
        self.pool = ThreadPoolExecutor(4)
        self.ended = self.pool.submit(self._run)

    def _run(self) -> None:
        for chunk in self.loop.run():
            self.chunks.append(chunk)

    def beside(self, call: Callable[[], Any]) -> Future[Any]:
        return self.pool.submit(call)


@contextmanager
def running(max_running: int = ROOM) -> Iterator[Case]:
    made = Case(max_running)
    try:
        yield made
    finally:
        for gate in (made.engine.gate, made.engine.refusal, made.engine.settle_gate):
            gate.set()
        try:
            made.loop.close()
        finally:
            made.pool.shutdown()


@pytest.fixture
def case() -> Iterator[Case]:
    with running() as made:
        yield made


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
    loop = EngineLoop(engine, SAMPLING, ROOM)
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


@pytest.mark.parametrize("max_running", [1, 2, 3, 4])
def test_prompts_begin_in_order_as_there_is_room(max_running: int) -> None:
    """Fails if the engine gets the whole backlog at once, a slot idles while there is one, the samples of a prompt are
    torn apart, or prompts overtake each other."""
    engine = Engine(slots=max_running)
    loop = EngineLoop(engine, SAMPLING, max_running)
    ids = [3, 5, 4, 9, 2, 7]
    loop.admit(prompts(*ids[:4]), range(4))
    chunks = loop.run()
    came = [next(chunks)]
    assert {prompt_id for _, prompt_id in engine.begun} < set(ids[:4]), "some wait"
    loop.admit(prompts(*ids[4:]), range(4, 6))
    came += [next(chunks) for _ in range(5)]
    assert sorted(chunk[0].prompt_id for chunk in came) == sorted(ids)
    assert [prompt_id for _, prompt_id in engine.begun] == [i for i in ids for _ in range(N)]
    assert [engine.begun[2 * j][0] for j in range(6)] == [engine.begun[2 * j + 1][0] for j in range(6)]
    assert engine.most == max_running - 1 + N
    for steps, _ in engine.begun:  # as soon as there was room, and no sooner
        there = sum(begun < steps for begun, _ in engine.begun) - sum(ended <= steps for ended, _ in engine.ended)
        before = sum(begun < steps for begun, _ in engine.begun) - sum(ended < steps for ended, _ in engine.ended)
        assert there < max_running and (steps == 0 or before >= max_running)
    chunks.close()  # type: ignore[attr-defined]


def test_a_guest_waits_for_room_and_not_for_the_backlog() -> None:
    """Fails if an evaluation beside the stream waits until the stream's whole backlog is answered, or a prompt of the
    backlog is lost over it."""
    n_prompts = 50
    with running(4) as case:
        case.engine.gate.clear()
        case.loop.admit(prompts(*[3] * n_prompts), range(n_prompts))
        until(lambda: case.engine.running)
        guest = case.beside(lambda: list(case.loop.generate(prompts(2), SAMPLING, [0])))
        until(lambda: case.loop._posted)
        case.engine.gate.set()
        assert len(guest.result(PATIENCE_S)) == N
        until(lambda: len(case.chunks) == n_prompts)
    assert [chunk[0].sample_index // N for chunk in case.chunks] == list(range(n_prompts))
    # It comes after step 1; the four sequences before it end with steps 3 and 4; it writes 2 and 3 tokens.
    assert [step for step, prompt_id in case.engine.ended if prompt_id == 2] == [5, 6]
    assert case.engine.steps > 80


def test_a_backlog_begins_with_the_newest_weights() -> None:
    """Fails if prompts that wait are begun before the weights that have come by then."""
    with running(2) as case:
        case.engine.gate.clear()
        case.loop.admit(prompts(1, 1), [0, 1])
        until(lambda: case.engine.running)
        receive = case.beside(lambda: case.loop.call(lambda: list(case.engine.begun)))
        until(lambda: case.loop._posted)
        case.engine.gate.set()
        assert receive.result(PATIENCE_S) == [(0, 1)] * N
        until(lambda: len(case.chunks) == 2)


def test_close_drops_the_backlog() -> None:
    """Fails if a stream that is closed still begins what was waiting, or leaves it to the next one."""
    with running(2) as case:
        case.loop.admit(prompts(10**6, 2, 3), [0, 1, 2])
        until(lambda: case.engine.steps)
        case.loop.close()
        case.ended.result(PATIENCE_S)
        assert [prompt_id for _, prompt_id in case.engine.begun] == [10**6] * N
        assert not case.engine.running and not case.chunks
        loop = EngineLoop(case.engine, SAMPLING, 2)
        loop.admit(prompts(4), [7])
        chunks = loop.run()
        assert [r.prompt_id for r in next(chunks)] == [4, 4]
        chunks.close()  # type: ignore[attr-defined]
        assert {prompt_id for _, prompt_id in case.engine.begun} == {10**6, 4}


def test_a_prompt_that_is_refused_when_its_turn_comes_ends_the_stream() -> None:
    """Fails if anyone waits for ever when a prompt of the backlog is refused, or what was admitted after it begins."""
    with running(3) as case:
        case.engine.refusal.clear()
        one = Sampling(1, 0.0, 1.0, 8, seed=0)
        guest = case.beside(lambda: list(case.loop.generate(prompts(10**6), one, [0])))
        until(lambda: case.engine.running)
        case.loop.admit(prompts(3, 10**6 + 1, 4), [0, 1, 2])
        # A slot gets free, and the loop is in the middle of giving it to the second prompt.
        until(lambda: any(prompt_id == 3 for _, prompt_id in case.engine.ended))
        waiting = case.beside(lambda: case.loop.call(lambda: None))
        until(lambda: case.loop._posted)
        case.engine.refusal.set()
        for failed in (case.ended, guest, waiting):
            with pytest.raises(DataError, match="prompt 1000001"):
                failed.result(PATIENCE_S)
        with pytest.raises(DataError, match="prompt 1000001"):
            case.loop.admit(prompts(1), [3])
        assert 4 not in {prompt_id for _, prompt_id in case.engine.begun} and not case.engine.running


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
    loop = EngineLoop(engine, SAMPLING, ROOM)
    loop.admit(prompts(1), [0])
    loop.close()
    assert list(loop.run()) == [] and engine.steps == 0 and not engine.begun


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


@pytest.mark.parametrize("where", ["drop", "settle"])
def test_the_first_error_stays_the_error(case: Case, where: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a run is told of an engine that could not be handed back, and not of why; or nobody is told of that."""
    logger = logging.getLogger("gkd.engine_loop")
    logger.addHandler(caplog.handler)  # the project's loggers don't propagate to where it listens
    try:
        case.engine.fails_in[where] = RuntimeError("the device is gone")
        guest = case.beside(lambda: list(case.loop.generate(prompts(10**6), SAMPLING, [0])))
        until(lambda: case.engine.steps > 3)
        case.engine.fails = RuntimeError("no memory")
        for failed in (case.ended, guest):
            with pytest.raises(RuntimeError, match="no memory"):
                failed.result(PATIENCE_S)
        with pytest.raises(RuntimeError, match="no memory"):
            case.loop.call(lambda: None)
        case.loop.close()
    finally:
        logger.removeHandler(caplog.handler)
    assert "the stream had failed (no memory); then its end did, too: the device is gone" in caplog.text


@pytest.mark.parametrize("where", ["drop", "settle"])
def test_a_close_that_fails_says_so(where: str) -> None:
    """Fails if an engine that could not be handed back is used by the next batch as if it had been."""
    case = Case()
    case.loop.call(lambda: None)
    case.engine.fails_in[where] = RuntimeError("the device is gone")
    for use in (case.loop.close, case.loop.close, lambda: case.loop.call(lambda: None)):
        with pytest.raises(RuntimeError, match="the device is gone"):
            use()
    with pytest.raises(RuntimeError, match="the device is gone"):
        case.ended.result(PATIENCE_S)
    case.pool.shutdown()


def test_nobody_waits_for_a_device_that_settles(case: Case) -> None:
    """Fails if a call to a failed stream hangs as long as its device does, or `close` returns before the device is
    free."""
    case.engine.settle_gate.clear()
    case.engine.gate.clear()
    case.loop.admit(prompts(10**6), [0])
    until(lambda: case.engine.running)
    posted = case.beside(lambda: case.loop.call(lambda: None))
    until(lambda: case.loop._posted)
    case.engine.fails = RuntimeError("no memory")
    case.engine.gate.set()
    assert case.engine.settling.wait(PATIENCE_S)
    for failed in (
        posted,
        case.beside(lambda: case.loop.call(lambda: None)),
        case.beside(lambda: case.loop.admit(prompts(1), [1])),
        case.beside(lambda: list(case.loop.generate(prompts(1), SAMPLING, [0]))),
    ):
        with pytest.raises(RuntimeError, match="no memory"):
            failed.result(PATIENCE_S / 2)  # less than `settle` waits
    closing = case.beside(case.loop.close)
    with pytest.raises(TimeoutError):
        closing.result(0.1)
    assert not case.ended.done()
    case.engine.settle_gate.set()
    closing.result(PATIENCE_S)
    with pytest.raises(RuntimeError, match="no memory"):
        case.ended.result(PATIENCE_S)


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
    loop = EngineLoop(engine, SAMPLING, ROOM)
    loop.admit(prompts(1, 10**6), [0, 1])
    running = loop.run()
    assert next(running)[0].prompt_id == 1
    running.close()  # type: ignore[attr-defined]
    assert engine.n_running == 0
    with pytest.raises(ClusterError, match="closed"):
        loop.admit(prompts(1), [2])


def test_a_streamed_prompt_leaves_as_its_rollouts_and_their_sizes() -> None:
    """Fails if the driver gets a chunk of another group, or more of it than its sizes; an engine has two streams; or
    its backlog does not go by rollout.max_num_seqs."""
    worker = RolloutWorker(3)
    worker._engine = Engine()  # type: ignore[assignment]
    worker._config = Config(rollout=RolloutConfig(max_num_seqs=2))
    worker._run_dir, worker._device = Path("not_there"), torch.device("cpu")
    for use in (lambda: worker.admit(b""), lambda: next(iter(worker.stream(2)))):
        with pytest.raises(ClusterError, match="rollout engine 3 has no open stream"):
            use()
    worker.open_stream(SAMPLING)
    with pytest.raises(ClusterError, match="one at a time"):
        worker.open_stream(SAMPLING)
    worker.admit(encode_prompts(prompts(4, 1), [6, 9]))
    items: Any = worker.stream(4)
    for place in (6, 9):  # one prompt at a time, as the config says
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
    request = Request("owner", prompts(0)[0], 0, "id")
    for stop, version in ((0, 1), (3, 2), (3, 3), (5, 4), (7, 4), (8, 6)):
        request.written(stop, version)
    assert request.spans == [VersionSpan(0, 3, 2), VersionSpan(3, 7, 4), VersionSpan(7, 8, 6)]


def test_a_prompt_goes_to_the_least_busy_engine() -> None:
    """Fails if engines idle while others queue, or the same run gives its prompts to other engines."""
    assert least_busy(5, [0, 0]) == [0, 1, 0, 1, 0]
    assert least_busy(4, [3, 0, 2]) == [1, 1, 1, 2]
    assert least_busy(0, [1]) == []
