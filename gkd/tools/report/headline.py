"""Answer the first questions about a run in one table: did it learn, how long did it take, which pool was slow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from gkd.metrics.catalog import PLACEHOLDERS
from gkd.metrics.health import PREFIX
from gkd.metrics.health_checks import CHECKS
from gkd.tools.report.read import Run

# Key -> whether a larger value is better.
SCORES = {"eval/kl": False, "eval/reverse_kl": False, "eval/accuracy": True}
LABELS = {
    "eval/kl": "KL(teacher || student), validation",
    "eval/reverse_kl": "KL(student || teacher), validation, estimated",
    "eval/accuracy": "Accuracy, validation",
    "loss/total": "Trained loss",
}


def headline(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the table: label and one cell per run, with its text, a tone (better, worse, empty) and a remark."""
    rows = [_row("Steps", [_steps(run) for run in runs])]
    for key, larger in SCORES.items():
        if any(key in run.curves for run in runs):
            rows.append(_row(LABELS[key], [_change(run, key, larger) for run in runs], key))
    rows.append(_row(LABELS["loss/total"], [_change(run, "loss/total") for run in runs], "loss/total"))
    times = [run.finite("time/step_s") for run in runs]
    rows.append(_row("Time", [_cell(_duration(sum(steps)) if steps else "-") for steps in times]))
    # A slow first step does not move the median.
    speeds = [run.finite("perf/response_tokens_per_s") for run in runs]
    medians = [_cell(_number(statistics.median(speed), 4) if speed else "-") for speed in speeds]
    rows.append(_row("Response tokens per second, median", medians))
    rows.append(_row("Bottleneck", [_bottleneck(run) for run in runs]))
    rows.append(_row("Health alarms", [_alarms(run) for run in runs]))
    return rows


def alarms(run: Run) -> list[dict[str, Any]]:
    """Return key, number of steps, first and last step, likely cause and what to change of each health alarm."""
    active = []
    checks = {PREFIX + check.name: check for check in CHECKS}
    for key, curve in run.curves.items():
        if key.startswith(PREFIX):
            steps = [step for step, value in zip(curve.steps, curve.values, strict=True) if value != 0]
            if steps:
                check = checks.get(key)  # None: of another version
                advice = {"cause": check.cause, "change": check.change.replace("`", "")} if check else {}
                active.append({"key": key, "n": len(steps), "first": steps[0], "last": steps[-1], **advice})
    return active


def _steps(run: Run) -> dict[str, str]:
    total = run.settings.get("trainer.total_steps") or 0
    gpus = run.gpu_map()
    text = f"{run.last_step} of {total}" if total else str(run.last_step)
    if gpus is not None and gpus.ended:
        return _cell(str(run.last_step) if run.last_step < total else text, "", "ended")  # total_epochs may end it
    if gpus is not None and gpus.stopped:
        return _cell(text, "", f"{gpus.stopped} at step {run.last_step}")
    last = run.curves.get("time/unix_s")
    if last is None or not last.values[-1]:
        return _cell(text, "", "in progress or killed")
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last.values[-1]))
    return _cell(text, "", f"in progress or killed; last line {written}")


def _change(run: Run, key: str, larger_is_better: bool | None = None) -> dict[str, str]:
    """Return first -> last value, with the best one if that is another."""
    curve = run.curves.get(key)
    points = [] if curve is None else [p for p in zip(curve.steps, curve.values, strict=True) if p[1] is not None]
    if not points:
        return _cell("-")
    values = [value for _, value in points if value is not None]
    text = " → ".join(_number(value, 4) for value in (values[0], *values[1:][-1:]))
    if larger_is_better is None or len(points) == 1:
        return _cell(text)
    gained = values[-1] - values[0] if larger_is_better else values[0] - values[-1]
    best = max(values) if larger_is_better else min(values)
    remark = "" if best == values[-1] else f"best {_number(best, 4)} at step {points[values.index(best)][0]}"
    return _cell(text, "better" if gained > 0 else "worse" if gained < 0 else "", remark)


def _bottleneck(run: Run) -> dict[str, str]:
    shares = {
        pool: statistics.fmean(values)
        for pool in PLACEHOLDERS["pool"]
        if (values := run.finite(f"perf/bound_by_{pool}"))
    }
    if not shares:
        return _cell("-")
    pool = max(shares, key=lambda name: shares[name])
    return _cell(pool, "", f"in {shares[pool]:.0%} of the steps")


def _alarms(run: Run) -> dict[str, str]:
    if not any(key.startswith(PREFIX) for key in run.curves):
        return _cell("-", "", "no health/ keys in metrics.jsonl")
    raised = alarms(run)
    return _cell("none") if not raised else _cell(", ".join(one["key"] for one in raised), "worse")


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{rest} s"


def _number(value: float, digits: int) -> str:
    """Return a number as people write it: not in exponents unless it is tiny or huge."""
    return f"{value:,.0f}" if 10**digits <= abs(value) < 10**9 else f"{value:.{digits}g}"


def _row(label: str, cells: list[dict[str, str]], key: str = "") -> dict[str, Any]:
    return {"label": label, "key": key, "cells": cells}


def _cell(text: str, tone: str = "", remark: str = "") -> dict[str, str]:
    return {"text": text, "tone": tone, "remark": remark}
