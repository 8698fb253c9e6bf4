"""Engine loop and streaming worker around a fake engine: order of work, errors, shutdown, encoding."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

from gkd.config.load import load_config
from gkd.data.chunks import decode_sizes
from gkd.errors import ClusterError, DataError, WeightSyncError
from gkd.rollout.engine.loop import Coalescer, EngineLoop
from gkd.rollout.messages import Job, Sampling, encode_prompts
from gkd.rollout.vllm.sampling import Request
from gkd.types import Prompt, Rollout, VersionSpan
from tests.processes import wait_until
from tests.unit.local_ray import worker_of
from tests.unit.step_engine import TIMEOUT_S, Engine

N = 2
SAMPLING = Sampling(N, 1.0, 1.0, 8, seed=0)
JOB = Job(1, SAMPLING, math.inf)
UNLIMITED = 1000  # more sequences than any test starts


def by_prompt() -> Coalescer:
    """Return a coalescer whose chunks are the samples of one prompt."""
    return Coalescer(10**6, N)


def rollouts_of(loop: EngineLoop) -> Iterator[list[Rollout]]:
    with closing(loop.run()) as chunks:  # type: ignore[type-var]
        for _, _, rollouts in chunks:
            yield rollouts


class Case:
    """A loop in its own thread, and the chunks it yielded."""

    def __init__(self, max_running: int = UNLIMITED) -> None:
        self.engine = Engine(slots=max_running)
        self.loop = EngineLoop(self.engine, max_running, by_prompt())
        self.chunks: list[list[Rollout]] = []
        self.pool = ThreadPoolExecutor(4)
        self.ended = self.pool.submit(self._run)

    def _run(self) -> None:
        for chunk in rollouts_of(self.loop):
            self.chunks.append(chunk)

    def in_thread(self, call: Callable[[], Any]) -> Future[Any]:
        return self.pool.submit(call)


@contextmanager
def running(max_running: int = UNLIMITED) -> Iterator[Case]:
    made = Case(max_running)
    try:
        yield made
    finally:
        for gate in (made.engine.gate, made.engine.refusal, made.engine.sync_gate):
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
    wait_until(condition, TIMEOUT_S, "the loop")


def cpu_seconds(case: Case) -> float:
    """Return what the loop's thread computes in 0.3 s."""
    began_s = case.loop.call(time.thread_time)
    time.sleep(0.3)
    return case.loop.call(time.thread_time) - began_s


def test_a_prompt_is_yielded_when_all_its_samples_are_finished() -> None:
    """Fails if a short prompt waits for a long one, or samples of prompts are mixed, lost or out of order."""
    engine = Engine()
    loop = EngineLoop(engine, UNLIMITED, by_prompt())
    running = rollouts_of(loop)
    loop.admit(JOB, prompts(50, 3), [4, 9])
    assert [r.sample_index for r in next(running)] == [18, 19]
    assert engine.steps == 4
    loop.admit(JOB, prompts(1), [2])
    assert [r.sample_index for r in next(running)] == [4, 5]
    assert [r.sample_index for r in next(running)] == [8, 9]
    assert engine.steps == 51
    loop.admit(JOB, prompts(0), [0])
    assert [r.sample_index for r in next(running)] == [0, 1]
    running.close()  # type: ignore[attr-defined]


def test_a_call_waits_for_one_step_and_not_for_a_sequence(case: Case) -> None:
    """Fails if a weight update waits until the engine is idle, or two threads use the engine concurrently."""
    engine = case.engine
    engine.gate.clear()
    case.loop.admit(JOB, prompts(10**6), [0])
    until(lambda: engine.running)
    order: list[tuple[str, int]] = []

    def note(name: str) -> None:
        assert engine.active_calls == 0
        order.append((name, engine.steps))

    calls = []
    for name in ("a", "b", "c"):
        calls.append(case.in_thread(lambda name=name: case.loop.call(lambda: note(name))))
        until(lambda: case.loop.n_pending_calls == len(calls))
    engine.gate.set()
    for call in calls:
        call.result(TIMEOUT_S)
    assert [name for name, _ in order] == ["a", "b", "c"]
    assert {steps for _, steps in order} == {1}, "all calls run after the step in progress"
    assert engine.n_running == N and not case.chunks


def test_calls_do_not_starve_the_steps(case: Case) -> None:
    """Fails if an engine that receives calls continuously generates nothing."""
    stop = threading.Event()

    def call_repeatedly() -> None:
        while not stop.is_set():
            case.loop.call(lambda: None)

    callers = [case.in_thread(call_repeatedly) for _ in range(3)]
    case.loop.admit(JOB, prompts(20), [0])
    until(lambda: case.chunks)
    stop.set()
    for caller in callers:
        caller.result(TIMEOUT_S)


def test_an_idle_loop_sleeps(case: Case) -> None:
    """Fails if an idle engine uses CPU time."""
    case.loop.call(lambda: None)
    assert cpu_seconds(case) < 0.05
    assert case.engine.steps == 0


def test_generate_during_a_stream_returns_only_its_own_rollouts(case: Case) -> None:
    """Fails if an evaluation waits for the stream's prompts, returns some of them, or leaves sequences behind."""
    case.loop.admit(JOB, prompts(10**6), [0])
    one = Sampling(1, 0.0, 1.0, 8, seed=0)
    got = [rollout.sample_index for rollout in case.loop.generate(prompts(5, 1, 3), one, [0, 1, 2])]
    assert got == [1, 2, 0]
    case.loop.admit(JOB, prompts(2), [1])
    until(lambda: case.chunks)
    assert [r.sample_index for chunk in case.chunks for r in chunk] == [2, 3]

    left = case.loop.generate(prompts(2, 10**6), one, [0, 1])
    assert next(left).prompt_id == 2
    left.close()  # type: ignore[attr-defined]
    until(lambda: case.loop.call(lambda: case.engine.n_running) == N)
    with pytest.raises(DataError):
        list(case.loop.generate(prompts(5, 10**6 + 1), one, [0, 1]))
    until(lambda: case.loop.call(lambda: case.engine.n_running) == N)
    assert not case.ended.done(), "a refused prompt of `generate` must not end the stream"


@pytest.mark.parametrize("max_running", [1, 2, 3])
def test_prompts_start_in_order_when_there_is_room(max_running: int) -> None:
    """Fails if the engine gets the whole backlog at once, a slot stays idle, the samples of a prompt start at different
    steps, or prompts start out of order."""
    engine = Engine(slots=max_running)
    loop = EngineLoop(engine, max_running, by_prompt())
    ids = [3, 5, 4, 9, 2, 7]
    loop.admit(JOB, prompts(*ids[:4]), range(4))
    chunks = rollouts_of(loop)
    received = [next(chunks)]
    assert {prompt_id for _, prompt_id in engine.started} < set(ids[:4]), "some are still in the backlog"
    loop.admit(JOB, prompts(*ids[4:]), range(4, 6))
    received += [next(chunks) for _ in range(5)]
    assert sorted(chunk[0].prompt_id for chunk in received) == sorted(ids)
    assert [prompt_id for _, prompt_id in engine.started] == [i for i in ids for _ in range(N)]
    assert [engine.started[2 * j][0] for j in range(6)] == [engine.started[2 * j + 1][0] for j in range(6)]
    assert engine.peak == max_running - 1 + N
    for steps, _ in engine.started:  # as soon as there was room, and not earlier
        running = sum(start < steps for start, _ in engine.started) - sum(ended <= steps for ended, _ in engine.ended)
        before = sum(start < steps for start, _ in engine.started) - sum(ended < steps for ended, _ in engine.ended)
        assert running < max_running and (steps == 0 or before >= max_running)
    chunks.close()  # type: ignore[attr-defined]


def test_generate_waits_for_a_slot_and_not_for_the_backlog() -> None:
    """Fails if a concurrent evaluation waits for the stream's whole backlog, or a prompt of the backlog is lost."""
    n_prompts = 50
    with running(4) as case:
        case.engine.gate.clear()
        case.loop.admit(JOB, prompts(*[3] * n_prompts), range(n_prompts))
        until(lambda: case.engine.running)
        evaluation = case.in_thread(lambda: list(case.loop.generate(prompts(2), SAMPLING, [0])))
        until(lambda: case.loop.n_pending_calls)
        case.engine.gate.set()
        assert len(evaluation.result(TIMEOUT_S)) == N
        until(lambda: len(case.chunks) == n_prompts)
    assert [chunk[0].sample_index // N for chunk in case.chunks] == list(range(n_prompts))
    # Submitted after step 1. The four sequences before it end at steps 3 and 4; it takes 2 and 3 steps.
    assert [step for step, prompt_id in case.engine.ended if prompt_id == 2] == [5, 6]
    assert case.engine.steps > 80


def test_the_backlog_starts_with_the_newest_weights() -> None:
    """Fails if backlogged prompts start before a pending weight update."""
    with running(2) as case:
        case.engine.gate.clear()
        case.loop.admit(JOB, prompts(1, 1), [0, 1])
        until(lambda: case.engine.running)
        receive = case.in_thread(lambda: case.loop.call(lambda: list(case.engine.started)))
        until(lambda: case.loop.n_pending_calls)
        case.engine.gate.set()
        assert receive.result(TIMEOUT_S) == [(0, 1)] * N
        until(lambda: len(case.chunks) == 2)


def test_a_refused_prompt_of_the_backlog_ends_the_stream() -> None:
    """Fails if a caller waits forever after a refusal, or prompts admitted after the refused one start."""
    with running(3) as case:
        case.engine.refusal.clear()
        one = Sampling(1, 0.0, 1.0, 8, seed=0)
        evaluation = case.in_thread(lambda: list(case.loop.generate(prompts(10**6), one, [0])))
        until(lambda: case.engine.running)
        case.loop.admit(JOB, prompts(3, 10**6 + 1, 4), [0, 1, 2])
        # A slot is free, and the loop is submitting the second prompt.
        until(lambda: any(prompt_id == 3 for _, prompt_id in case.engine.ended))
        waiting = case.in_thread(lambda: case.loop.call(lambda: None))
        until(lambda: case.loop.n_pending_calls)
        case.engine.refusal.set()
        for failed in (case.ended, evaluation, waiting):
            with pytest.raises(DataError):
                failed.result(TIMEOUT_S)
        with pytest.raises(DataError):
            case.loop.admit(JOB, prompts(1), [3])
        assert 4 not in {prompt_id for _, prompt_id in case.engine.started} and not case.engine.running


def test_close_leaves_nothing_in_the_engine() -> None:
    """Fails if a closed stream leaves sequences in the engine, or still starts its backlog."""
    with running(3 * N) as case:
        evaluation = case.in_thread(lambda: list(case.loop.generate(prompts(10**6), SAMPLING, [0])))
        until(lambda: case.loop.call(lambda: case.engine.n_running) == N)
        case.loop.admit(JOB, prompts(10**6, 10**6, 2, 3), range(4))
        until(lambda: case.loop.call(lambda: case.engine.n_running) == 3 * N)
        case.loop.close()
        case.loop.close()
        assert case.engine.n_running == 0 and not case.engine.done
        assert {prompt_id for _, prompt_id in case.engine.started} == {10**6} and not case.chunks
        case.ended.result(TIMEOUT_S)
        with pytest.raises(ClusterError):
            evaluation.result(TIMEOUT_S)
        for use in (lambda: case.loop.admit(JOB, prompts(1), [5]), lambda: case.loop.call(lambda: None)):
            with pytest.raises(ClusterError):
                use()


def test_a_stream_that_was_never_run_can_be_closed() -> None:
    """Fails if a stream that opened only on some engines cannot be closed."""
    engine = Engine()
    loop = EngineLoop(engine, UNLIMITED, by_prompt())
    loop.admit(JOB, prompts(1), [0])
    loop.close()
    assert list(rollouts_of(loop)) == [] and engine.steps == 0 and not engine.started


@pytest.mark.parametrize("where", ["abort", "synchronize"])
def test_the_first_error_is_raised_and_later_ones_are_logged(
    case: Case, where: str, gkd_log: pytest.LogCaptureFixture
) -> None:
    """Fails if a clean-up error replaces the original error, or is not logged."""
    case.engine.errors[where] = RuntimeError("the device is gone")
    evaluation = case.in_thread(lambda: list(case.loop.generate(prompts(10**6), SAMPLING, [0])))
    until(lambda: case.engine.steps > 3)
    case.engine.error = MemoryError("no memory")
    for failed in (case.ended, evaluation):
        with pytest.raises(MemoryError):
            failed.result(TIMEOUT_S)
    with pytest.raises(MemoryError):
        case.loop.call(lambda: None)
    case.loop.close()
    assert "no memory" in gkd_log.text and "the device is gone" in gkd_log.text


@pytest.mark.parametrize("where", ["abort", "synchronize"])
def test_close_raises_a_clean_up_error(where: str) -> None:
    """Fails if the next batch uses an engine whose clean-up failed."""
    case = Case()
    if where == "abort":  # only an engine with sequences
        case.loop.admit(JOB, prompts(10**6), [0])
        until(lambda: case.engine.running)
    case.loop.call(lambda: None)
    case.engine.errors[where] = RuntimeError("the device is gone")
    for use in (case.loop.close, case.loop.close, lambda: case.loop.call(lambda: None)):
        with pytest.raises(RuntimeError, match="the device is gone"):
            use()
    with pytest.raises(RuntimeError, match="the device is gone"):
        case.ended.result(TIMEOUT_S)
    case.pool.shutdown()


def test_only_close_waits_for_the_device(case: Case) -> None:
    """Fails if a caller waits forever for a failed engine or its device, gets another error, or `close` returns before
    the device is idle.
    """
    case.engine.sync_gate.clear()
    case.engine.gate.clear()
    case.loop.admit(JOB, prompts(10**6), [0])
    until(lambda: case.engine.running)
    queued = [
        case.in_thread(lambda: case.loop.call(lambda: None)),
        case.in_thread(lambda: list(case.loop.generate(prompts(1), SAMPLING, [0]))),
    ]
    until(lambda: case.loop.n_pending_calls == 2)
    case.engine.error = MemoryError("no memory")
    case.engine.gate.set()
    assert case.engine.syncing.wait(TIMEOUT_S)
    for failed in (
        *queued,
        case.in_thread(lambda: case.loop.call(lambda: None)),
        case.in_thread(lambda: case.loop.admit(JOB, prompts(1), [1])),
        case.in_thread(lambda: list(case.loop.generate(prompts(1), SAMPLING, [0]))),
    ):
        with pytest.raises(MemoryError):
            failed.result(TIMEOUT_S / 2)  # less than `synchronize` waits
    closing = case.in_thread(case.loop.close)
    with pytest.raises(TimeoutError):
        closing.result(0.1)
    assert not case.ended.done()
    case.engine.sync_gate.set()
    closing.result(TIMEOUT_S)
    with pytest.raises(MemoryError):
        case.ended.result(TIMEOUT_S)


def test_only_fatal_calls_end_the_stream(case: Case) -> None:
    """Fails if a failed weight update ends the stream, or a failed removal of sequences does not."""

    def fail() -> None:
        raise WeightSyncError("a tensor is missing")

    case.loop.admit(JOB, prompts(10**6), [0])
    with pytest.raises(WeightSyncError):
        case.loop.call(fail)
    assert not case.ended.done()
    generation = case.loop.generate(prompts(1, 10**6), SAMPLING, [0, 1])
    assert next(generation).prompt_id == 1
    case.engine.errors["abort"] = failed = ClusterError("the engine cannot abort")
    generation.close()  # type: ignore[attr-defined]
    with pytest.raises(ClusterError) as caught:
        case.ended.result(TIMEOUT_S)
    assert caught.value is failed


def test_a_streamed_prompt_is_returned_as_rollouts_and_sizes() -> None:
    """Fails if a chunk has the wrong group or sizes, an engine opens two streams, or the backlog ignores
    rollout.max_num_seqs."""
    worker = worker_of(Engine(), load_config(None, ["rollout.max_num_seqs=2"]))
    with pytest.raises(ClusterError, match="rollout engine 0"):
        next(iter(worker.stream()))
    worker.open_stream(5, 4, 3)
    with pytest.raises(ClusterError, match="rollout engine 0"):
        worker.open_stream(6, 4, 3)
    worker.admit(4, JOB, encode_prompts(prompts(9), [8]), False)  # of a stream that is closed
    worker.admit(5, JOB, encode_prompts(prompts(4, 1), [6, 9]), False)
    items: Any = worker.stream()
    for index in (6, 9):  # max_num_seqs = n: one prompt at a time
        rollouts, sizes = next(items), next(items)
        assert isinstance(sizes, bytes) and len(sizes) == 16 + 32 * N
        job, chunk = decode_sizes(sizes, rollouts)
        assert (job, chunk.dp_rank, chunk.versions.tolist()) == (1, index % 4, [0] * N)
        assert chunk.sample_index.tolist() == [index * N, index * N + 1] == [r.sample_index for r in chunk.ref]
    with pytest.raises(DataError):
        worker.admit(5, JOB, b"abc", False)
    items.close()
    worker.close_stream()
    worker.close_stream()
    worker.open_stream(6, 4, 3)
    worker.close_stream()


def test_spans_attribute_tokens_to_versions() -> None:
    """Fails if a version without tokens gets a span, or a version that was pushed twice gets two."""
    request = Request("owner", prompts(0)[0], 0, SAMPLING, 1)
    for stop, version in ((0, 1), (3, 2), (3, 3), (5, 4), (7, 4), (8, 6)):
        request.record_span(stop, version)
    assert request.spans == [VersionSpan(0, 3, 2), VersionSpan(3, 7, 4), VersionSpan(7, 8, 6)]


def test_a_failed_weight_sync_pauses_the_stream_until_one_succeeds(case: Case) -> None:
    """Fails if an engine generates with a mixture of two versions, ends its stream, waits busily, or does not go on."""

    def receive(*, fails: bool) -> None:
        case.engine.has_weights = not fails
        if fails:
            raise WeightSyncError("a sender died")

    case.loop.admit(JOB, prompts(50), [0])
    until(lambda: case.engine.steps > 2)
    with pytest.raises(WeightSyncError):
        case.loop.call(lambda: receive(fails=True))
    steps = case.engine.steps
    case.loop.admit(JOB, prompts(1), [1])
    assert {case.loop.call(lambda: case.engine.steps) for _ in range(50)} == {steps}, "calls are still executed"
    assert cpu_seconds(case) < 0.05
    assert not case.ended.done()
    case.loop.call(lambda: receive(fails=False))
    until(lambda: len(case.chunks) == 2)
