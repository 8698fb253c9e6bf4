"""Test how bench_pipeline divides a step, on a run with known spans and calls."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.bench.driver_calls import CALLS, KINDS, QUEUE, SERIALISATION, TRANSIT
from tests.bench.pipeline_spans import RunSpans, kinds_s

T0 = 1000.0


def call(kind: str, start_s: float, end_s: float, cpu_s: float) -> tuple[float, ...]:
    """Return a call of the driver that used no CPU time; the thread had used `cpu_s` before."""
    return KINDS.index(kind), T0 + start_s, T0 + end_s, cpu_s, cpu_s


def test_parts_add_up_to_the_step(tmp_path: Path) -> None:
    """Fails if time is counted twice or lost, a wait for another thread hides what that thread calls, or time without
    a processor counts as work of the driver.
    """
    stages = {0: [("rollout", 0.0, 4.0), ("train", 5.0, 9.0)], 1: [("rollout", 10.0, 11.0)]}
    spans = [(step, "driver", stage) for step, found in stages.items() for stage in found]
    spans += [(0, "engine 0", ("generate", 1.0, 2.5)), (0, "actor 0", ("train", 6.0, 8.0))]
    lines = [
        {
            "step": step,
            "process": process,
            "host": "",
            "spans": [{"name": name, "start_s": T0 + start, "duration_s": end - start, "args": {}}],
        }
        for step, process, (name, start, end) in spans
    ]
    (tmp_path / "spans.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    main = [
        call(CALLS, -1.0, 0.5, 1.0),
        call(QUEUE, 0.5, 4.0, 1.0),  # to 0.5 Ray, to 1.0 queue, engine to 2.5; to 3.0 another thread's result
        call(CALLS, 5.0, 5.5, 1.25),  # 0.25 of the second before on a processor
        call(TRANSIT, 5.5, 9.0, 1.25),  # to 5.75 a rank reads arguments, to 6.0 in its method; then until 8.5 in it
        call(CALLS, 10.0, 10.5, 2.25),
    ]
    arrays = {
        "main": main,
        "others": [call(SERIALISATION, 2.0, 3.0, 0.0)],
        "methods": [(T0 + 5.5, T0 + 8.5)],
        "around": [(T0 + 5.25, T0 + 5.75)],
    }
    np.savez(tmp_path / "calls.npz", **{name: np.array(rows) for name, rows in arrays.items()})
    run = RunSpans(tmp_path, tmp_path / "calls.npz", 0, 1)
    parts = {part: seconds for part, seconds in run.breakdown().items() if seconds}
    assert parts == pytest.approx({
        "generate": 1.5, "rollout: Ray calls": 0.5, "rollout: queue": 1.5, "rollout: serialisation": 0.5,
        "train compute": 2.0, "train: Ray calls": 0.5, "train: serialisation": 0.25, "train: methods": 0.75,
        "train: in transit": 0.5, "between stages: Python": 1.25, "between stages: no processor": 0.75,
    })  # fmt: skip
    assert sum(parts.values()) == pytest.approx(run.step_s())
    assert kinds_s(parts)["compute"] == pytest.approx(3.5)
