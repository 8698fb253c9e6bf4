"""Test spans: what a process records, spans.jsonl, and the trace made of it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from gkd.errors import CheckpointError
from gkd.metrics.run_metrics import StepMetrics
from gkd.metrics.span_file import SpanFile, SpanLine, read_spans
from gkd.metrics.writer import MetricsWriter
from gkd.roles import Computation
from gkd.spans import MAX_SPANS, Phase, ProcessSpans, Span, SpanRecorder, driver
from gkd.tools import trace
from gkd.types import ScoredChunk, ScoreTimes
from tests.refusals import refuses
from tests.rollout_chunks import chunk_of
from tests.unit.console_runs import Clock
from tests.unit.world import World, make


def recorder(clock: Clock, wall_s: float = 0.0) -> SpanRecorder:
    return SpanRecorder("p", clock=clock, wall=lambda: clock.now_s + wall_s)


def test_blocks_are_recorded_in_lanes() -> None:
    """Fails if a nested block overlaps its outer one in one lane, a block in one of its own name counts twice, or
    starts are not on the wall clock.
    """
    clock = Clock()
    spans = recorder(clock, 100.0)
    with spans.span(Phase.TRAIN):
        clock.now_s += 1
        with spans.span(Phase.OFFLOAD), spans.span(Phase.OFFLOAD):
            clock.now_s += 2
        clock.now_s += 1
    with pytest.raises(ValueError, match="x"), spans.span(Phase.SAVE):
        clock.now_s += 1
        raise ValueError("x")
    found = spans.take().spans
    assert found == [Span("train", 1100, 4), Span("offload", 1101, 2, {"lane": 1}), Span("save", 1104, 1)]
    assert not spans.take().spans


def test_passes_without_a_long_gap_are_one_period() -> None:
    """Fails if each pass of an engine is a span, or a pause between two batches is hidden."""
    clock = Clock()
    spans = recorder(clock)
    for _ in range(5):
        spans.extend(Phase.GENERATE, clock.now_s, clock.now_s + 0.5)
        clock.now_s += 0.52
    clock.now_s += 1
    spans.extend(Phase.GENERATE, clock.now_s, clock.now_s + 0.5)
    first, second = spans.take().spans
    assert first.duration_s == pytest.approx(2.58) and first.args["parts"] == 5 and second.args["parts"] == 1


@pytest.mark.parametrize("n", [MAX_SPANS, MAX_SPANS + 1, 1000, 12345])
def test_the_number_of_spans_is_bounded(n: int) -> None:
    """Fails if a large batch fills memory or the file, or merged spans are not counted."""
    clock = Clock()
    spans = recorder(clock)
    for i in range(n):
        clock.now_s += 1
        spans.add(("a", "b")[i % 2], clock.now_s, clock.now_s + 0.25)
    found = spans.take().spans
    assert MAX_SPANS / 4 < len(found) <= MAX_SPANS
    assert sum(span.args.get("merged", 1) for span in found) == n
    assert sum(span.args.get("busy_s", span.duration_s) for span in found) == pytest.approx(0.25 * n)


@pytest.mark.parametrize("n_merged", [1, 1000])
def test_stages_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch, n_merged: int) -> None:
    """Fails if a stage of an earlier step counts, a failed or merged one does not, or time outside is hidden."""
    clock = Clock()
    monkeypatch.setattr(driver, "clock", clock)
    driver.take()
    with StepMetrics(1).stage("train"):
        clock.now_s += 8.0
    clock.now_s += 1.0
    m = StepMetrics(2)
    for _ in range(n_merged):
        with m.stage("rollout"):
            clock.now_s += 2.0 / n_merged
    with pytest.raises(ValueError), m.stage("train"):
        clock.now_s += 1.0
        raise ValueError
    clock.now_s += 2.0
    times = {"time/rollout_s": 2.0, "time/train_s": 1.0, "time/step_s": 5.0, "time/accounted_share": 0.6}
    assert m.times() == pytest.approx(times)
    driver.take()


def test_what_must_not_nest_is_refused() -> None:
    """Fails if nested stages count the same seconds twice, or a phase resets the peak memory of its outer one."""
    spans = recorder(Clock())
    with spans.doing(Phase.STEP), spans.span(Phase.TRAIN, outermost=True):
        with pytest.raises(RuntimeError), spans.span(Phase.TRAIN, outermost=True):
            pass
        with spans.span(Phase.OFFLOAD):
            pass
    with spans.span(Phase.EXPORT, outermost=True):
        pass
    assert {span.name for span in spans.take().spans} == {"train", "offload", "export"}


def test_a_rank_is_ready_between_its_calls() -> None:
    """Fails if a rank is ready before it has started, reports a phase that has ended, or seconds of another one."""
    clock = Clock()
    spans = SpanRecorder("actor 0", Phase.STARTED, clock=clock)
    told: list[tuple[Phase | str, float]] = []

    def tell() -> None:
        clock.now_s += 1.0
        progress = spans.progress()
        told.append((progress.phase, progress.for_s))

    tell()
    spans.enter("building the model")
    with spans.span(Phase.OFFLOAD):
        tell()
    tell()
    spans.enter(Phase.READY)
    with pytest.raises(ValueError), spans.span(Phase.TRAIN):
        tell()
        with spans.span(Phase.ONLOAD):
            tell()
        tell()
        raise ValueError
    tell()
    phases = [Phase.STARTED, Phase.OFFLOAD, "building the model", Phase.TRAIN, Phase.ONLOAD, Phase.TRAIN, Phase.READY]
    assert told == list(zip(phases, [1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 1.0], strict=True))


def opened(tmp_path: Path, own: SpanRecorder = driver) -> SpanFile:
    return SpanFile(MetricsWriter(tmp_path / "spans.jsonl", -1), "teacher-host", own)


def lines_of(tmp_path: Path) -> dict[tuple[int, str], tuple[Span, ...]]:
    return {(line.step, line.process): line.spans for line in read_spans(tmp_path / "spans.jsonl")}


def test_a_late_span_belongs_to_the_step_in_which_it_started(tmp_path: Path) -> None:
    """Fails if scores that are collected a step later are drawn in the wrong step."""
    file = opened(tmp_path)
    for step in (1, 2, 3, 4):
        file.begin(step)
        began = time.perf_counter()
        time.sleep(0.02)
        if step == 2:
            early_s = time.time()
        driver.add("train", began, time.perf_counter())
        if step == 3:
            file.add(
                [ProcessSpans("engine 0", "h", [Span("generate", early_s, 0.5), Span("generate", time.time(), 0)])]
            )
        file.end()
    found = lines_of(tmp_path)
    assert set(found) == {*((step, "driver") for step in (1, 2, 3, 4)), (2, "engine 0"), (3, "engine 0")}
    assert len(found[2, "engine 0"]) == len(found[3, "engine 0"]) == 1


def test_a_stage_that_starts_with_its_step_is_not_drawn_in_the_step_before(tmp_path: Path) -> None:
    """Fails if the driver's stages and the starts of steps are put on the wall clock by two different readings."""
    skews = iter(np.linspace(0.0, -1.0, 200).tolist())  # of the wall clock: each reading is earlier than the last one
    wall_s, seconds = time.time(), 0.0
    own = SpanRecorder("driver", clock=lambda: seconds, wall=lambda: wall_s + next(skews))
    file = opened(tmp_path, own=own)
    for step in (1, 2, 3):
        seconds += 10.0
        file.begin(step)
        own.add("train", seconds, seconds + 1.0)
        file.end()
    assert set(lines_of(tmp_path)) == {(step, "driver") for step in (1, 2, 3)}


def test_chunks_and_batches_of_the_teacher_are_placed(tmp_path: Path) -> None:
    """Fails if concurrent chunks share a lane, a batch of two endpoints counts twice, or two batches overlap."""
    file = opened(tmp_path)
    file.begin(1)
    at = time.time()
    chunk = chunk_of(range(2), 5, n_prompt=2)
    times = (ScoreTimes(at, np.array([at + 0.25, at + 0.5])), ScoreTimes(at + 0.25, np.array([at + 0.75])), None)
    file.add_scored([ScoredChunk(chunk, None, None, 0, each) for each in times])
    second = Computation("w", at + 0.625, 0.5, 0.25, 3)  # starts before the reply of the first one has arrived
    by_endpoint = {
        "scoring 0": [Computation("w", at + 0.5, 0.125, 0.375, 2), second],
        "scoring 1": [Computation("w", at + 0.4375, 0.25, 0.375, 2)],
    }
    file.add_computations(by_endpoint)
    file.end()
    found = lines_of(tmp_path)
    assert [span.args.get("lane", 0) for span in found[1, "scoring 0"]] == [0, 1]
    assert found[1, "scoring 0"][0].args == {"sequences": 2, "tokens": 14}
    placed = [(span.start_s - at, span.duration_s) for span in found[1, "teacher w"]]
    assert [span.args["sequences"] for span in found[1, "teacher w"]] == [4, 3]
    assert placed == [pytest.approx(each, abs=1e-4) for each in ((0.0625, 0.3125), (0.375, 0.25))]


def test_a_resumed_run_keeps_the_spans_of_the_steps_that_it_keeps(tmp_path: Path) -> None:
    """Fails if spans of discarded steps stay, or those of kept steps are lost."""
    settings = ("trainer.total_steps=4", "trainer.save_every=2", "trainer.keep_last=9")
    make(tmp_path, World(), *settings).fit()
    run = tmp_path / "run"
    assert {step for step, process in lines_of(run) if process == "driver"} == {0, 1, 2, 3, 4}
    assert {"driver", "actor 0", "teacher w"} == {process for _, process in lines_of(run)}
    before = read_spans(run / "spans.jsonl")
    make(tmp_path, World(), "trainer.total_steps=3", f"trainer.resume={run / 'checkpoints' / 'step_00000002'}").fit()
    after = read_spans(run / "spans.jsonl")
    kept = [line for line in before if line.step <= 2]
    assert after[: len(kept)] == kept and {line.step for line in after} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1}',
        '{"step": 1, "process": "driver", "host": "h", "spans": [{"name": "a", "start_s": NaN, "duration_s": 1}]}',
        '{"step": 1, "process": "driver", "host": "h", "spans": [{"name": "a", "start_s": 1, "duration_s": -1}]}',
        '{"step": 1, "process": "ghost 1", "host": "h", "spans": []}',
        "{",
    ],
)
def test_a_damaged_line_is_refused(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a damaged file ends in a traceback, or is drawn in part."""
    (tmp_path / "spans.jsonl").write_text(line + "\n")
    with pytest.raises(CheckpointError):
        read_spans(tmp_path / "spans.jsonl")
    assert trace.main([str(tmp_path), "--out", str(tmp_path / "t.json")]) == 1
    assert not (tmp_path / "t.json").exists() and "line 1" in capsys.readouterr().err


def test_wrong_arguments_of_the_trace_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a wrong range gives an empty trace, or a missing run a traceback or no advice."""
    lines = [SpanLine(step, "driver", "h", (Span("train", 1.0 * step, 0.5),)) for step in (3, 4)]
    for steps in ("5-9", "x", "3-", "4-3", "-1"):
        with refuses("--steps", steps):
            trace.select(lines, steps)
    assert [len(trace.select(lines, steps)) for steps in (None, "3", "3-4")] == [2, 1, 2]
    out = str(tmp_path / "t.json")
    assert trace.main([str(tmp_path), "--out", out]) == 2
    assert "trainer.run_dir" in capsys.readouterr().err
    (tmp_path / "spans.jsonl").write_text("")
    assert trace.main([str(tmp_path), "--out", out]) == 2
    (tmp_path / "spans.jsonl").write_text(
        '{"step": 1, "process": "driver", "host": "h", "spans": [{"name": "a", "start_s": 1, "duration_s": 1}]}\n'
    )
    assert trace.main([str(tmp_path), "--out", str(tmp_path / "no" / "t.json")]) == 1
    assert trace.main([str(tmp_path), "--out", out]) == 0
