"""Test spans, trace and profiles of a real run, and the replay of one of its steps."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from gkd.metrics.span_file import read_spans
from gkd.metrics.writer import read_metrics
from gkd.spans import Span
from gkd.tools import replay, trace
from tests.e2e.exactness import steps_of

pytestmark = pytest.mark.e2e
SLACK_S = 0.02  # between the clocks and calls of two processes on one host
ARRIVAL_S = 0.1  # a teacher's batch is placed by the arrival of its first reply, on a busy machine


def spans_of(run_dir: Path, role: str, name: str) -> list[tuple[int, Span]]:
    """Return (step, span) of all processes of a role."""
    lines = [line for line in read_spans(run_dir / "spans.jsonl") if line.process.startswith(role)]
    return [(line.step, span) for line in lines for span in line.spans if span.name == name]


def outside(
    inner: Sequence[tuple[int, Span]], outer: Sequence[tuple[int, Span]], slack_s: float = SLACK_S
) -> list[tuple[int, Span]]:
    """Return the inner spans that fit into none of the outer ones."""
    return [
        (step, span)
        for step, span in inner
        if not any(
            other.start_s - slack_s <= span.start_s
            and span.start_s + span.duration_s <= other.start_s + other.duration_s + slack_s
            for _, other in outer
        )
    ]


def test_spans_of_all_processes_fit_into_the_stages_of_the_driver(base_run: Path) -> None:
    """Fails if a process is not recorded, is on another clock or in another step, or spans of one row overlap."""
    lines = read_spans(base_run / "spans.jsonl")
    processes = {line.process for line in lines}
    teachers = {name for name in processes if name.startswith("teacher ")}
    assert processes - teachers == {"driver", "actor 0", "engine 0", "scoring 0"} and len(teachers) == 1
    for inner, outer in {
        ("actor", "train"): ["train"],
        ("actor", "sync"): ["weight_sync"],
        ("engine", "receive_weights"): ["weight_sync"],
        ("engine", "generate"): ["rollout", "eval"],
        ("actor", "evaluate"): ["eval"],
    }.items():
        found = spans_of(base_run, *inner)
        stages = [pair for stage in outer for pair in spans_of(base_run, "driver", stage)]
        assert found and not outside(found, stages), inner
        assert {step for step, _ in found} <= {step for step, _ in stages}
    assert [step for step, _ in spans_of(base_run, "actor", "train")] == [1, 2, 3, 4]
    assert [step for step, _ in spans_of(base_run, "actor", "sync")] == [0, 1, 2, 3, 4]
    scores = spans_of(base_run, "scoring", "score")
    assert sum(span.args["sequences"] for step, span in scores if step == 2) == 12
    computed = spans_of(base_run, "teacher", "compute")
    assert sum(span.args["sequences"] for _, span in computed) == sum(span.args["sequences"] for _, span in scores)
    assert not outside(computed, scores, ARRIVAL_S) and all(span.args["queue_s"] >= 0 for _, span in computed)
    numbers = steps_of(base_run)
    for step, span in spans_of(base_run, "driver", "train"):
        assert span.duration_s == pytest.approx(numbers[step]["time/train_s"], abs=1e-5)
    rows: dict[tuple[str, float], list[Span]] = {}
    for line in lines:
        for span in line.spans:
            rows.setdefault((line.process, span.args.get("lane", 0)), []).append(span)
    for spans in rows.values():
        spans.sort(key=lambda span: span.start_s)
        ends = [span.start_s + span.duration_s for span in spans]
        assert all(end_s <= after.start_s + 1e-5 for end_s, after in zip(ends, spans[1:], strict=False))


def test_a_trace_of_the_run_is_valid(base_run: Path, tmp_path: Path) -> None:
    """Fails if Perfetto would refuse the trace or show unnamed or unsorted processes, or steps are not marked."""
    out = tmp_path / "trace.json"
    assert trace.main([str(base_run), "--steps", "1-3", "--out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"M", "X"}
    starts = [event["ts"] for event in slices]
    assert starts == sorted(starts) and starts[0] == 0 and all(event["dur"] >= 0 for event in slices)
    about = {(e["name"], e["pid"]): e["args"] for e in events if e["ph"] == "M"}
    names = {pid: args["name"] for (what, pid), args in about.items() if what == "process_name"}
    order = sorted(names, key=lambda pid: int(about["process_sort_index", pid]["sort_index"]))
    assert [names[pid].split()[0] for pid in order] == ["driver", "actor", "engine", "scoring", "teacher"]
    assert {event["pid"] for event in slices} == set(names)
    assert [event["name"] for event in slices if event["name"].startswith("step ")] == ["step 1", "step 2", "step 3"]
    assert {event["args"]["step"] for event in slices if event["name"] == "train"} == {1, 2, 3}


def test_chosen_steps_are_profiled(base_run: Path) -> None:
    """Fails if trainer.profile_steps profiles other steps, or the trace has no operation of the training step."""
    files = sorted(path.name for path in (base_run / "profile").iterdir())
    assert files == ["step_00000002_rank_0.json.gz"]
    with gzip.open(base_run / "profile" / files[0]) as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "aten::embedding"} <= names


@pytest.mark.slow  # in CI: replayed batches in unit/test_replay.py, bit-exact resumes in dist/test_megatron_resume.py
def test_a_recorded_step_comes_out_again(
    base_run: Path, shared_ray: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fails if a replay of a step differs by a bit, does not report a recorded loss that is not that of the step, needs
    a teacher or an engine, or writes into the run's folder.
    """
    run = tmp_path / "run"
    shutil.copytree(base_run, run)
    lines = read_metrics(run / "metrics.jsonl")
    recorded = dict(next(line for line in lines if line["step"] == 4))
    for line in lines:
        if line["step"] == 4:
            line["loss/total"] *= 1.01
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert replay.find_case(run, 4, [shared_ray]).first == 2
    assert replay.main([str(run), "--step", "4", shared_ray]) == 1
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    found = {row[0]: float(row[2]) for row in rows if len(row) == 4 and row[0] in recorded}
    assert found == {key: recorded[key] for key in ("loss/total", "optim/grad_norm", "loss/tokens")}
