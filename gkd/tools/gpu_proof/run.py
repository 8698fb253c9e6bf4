"""Run one stage as a process group of its own with a time limit, and judge what it has left.

A stage is a benchmark that writes the figures of `tests/bench/teacher_report.py`, or pytest, which writes JUnit XML.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gkd.tools.gpu_proof.stages import JSON, XML, Stage

PASS, FAIL, SKIPPED, ERROR, TIMED_OUT = "pass", "fail", "skipped", "error", "timed out"
GRACE_S = 20.0  # from SIGTERM to SIGKILL: a run of the whole system stops its own processes
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.1
_NO_TESTS = 5  # pytest's exit code


@dataclass(slots=True)
class Outcome:
    """The end of a stage. `figures`: name, value, unit, goal, met, note of each."""

    verdict: str
    reason: str = ""
    seconds: float = 0.0
    figures: list[dict[str, Any]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def run_stage(stage: Stage, device: str, root: Path, out: Path, *, grace_s: float = GRACE_S) -> Outcome:
    """Run a stage to its end or its limit; blocks. Its output goes to `out/<stage>.log`. Call it in the main thread.

    Whatever ends this call, Ctrl-C included, no process of the stage is left.

    Args:
        root: the repository, where the stage runs.
    """
    files = {JSON: out / f"{stage.name}.json", XML: out / f"{stage.name}.xml"}
    for file in files.values():
        file.unlink(missing_ok=True)
    command = [sys.executable, "-m", *(str(files.get(word, word)) for word in stage.words(device))]
    log, began = out / f"{stage.name}.log", time.monotonic()
    process = _started(command, root, log, {"GKD_TEST_DEVICE": device})
    in_time = False
    try:
        in_time = _wait(process, stage.limit_s)
    finally:
        _stop(process, grace_s)
    outcome = _judged(process.returncode, files[JSON], files[XML], log)
    if outcome.verdict == PASS and headline(outcome.figures, stage.figure) is None:
        outcome.verdict, outcome.reason = ERROR, f"it has measured no figure named {stage.figure!r}"
    if not in_time:
        outcome.verdict, outcome.reason = TIMED_OUT, f"stopped after {stage.limit_s} s; {log.name} ends: {_last(log)}"
    outcome.seconds, outcome.command = round(time.monotonic() - began, 1), command
    return outcome


@contextmanager
def prepared(
    stages: Sequence[Stage], root: Path, out: Path, *, grace_s: float = GRACE_S
) -> Iterator[Callable[[Stage], None]]:
    """Start what these stages prepare, in the background, without a GPU; yield a function that waits for a stage's.

    A stage whose preparation fails or takes longer than its limit makes the same itself. At the end of the context,
    Ctrl-C included, what still runs is stopped. Its output goes to `out/<stage>.prepare.log`.
    """
    first = {stage.prepare: stage for stage in reversed(stages) if stage.prepare}
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    running = {
        words: _started([sys.executable, "-m", *words], root, out / f"{stage.name}.prepare.log", hidden)
        for words, stage in first.items()
    }

    def wait_for(stage: Stage) -> None:
        if (process := running.pop(stage.prepare, None)) is not None:
            try:
                _wait(process, stage.limit_s)
            finally:
                _stop(process, grace_s)

    try:
        yield wait_for
    finally:
        for process in running.values():
            _stop(process, grace_s)


def _started(command: Sequence[str], root: Path, log: Path, more: dict[str, str]) -> psutil.Popen:
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"} | more
    with log.open("wb") as output:
        return psutil.Popen(
            command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def headline(figures: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Return the figure for the table: the first whose name begins with `name`."""
    return next((figure for figure in figures if figure["name"].startswith(name)), None)


def _wait(process: psutil.Popen, limit_s: float) -> bool:
    """Return whether the process ended within the limit."""
    try:
        process.wait(limit_s)
    except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
        return False
    return True


def _stop(process: psutil.Popen, grace_s: float) -> None:
    """End the process, its group, and descendants that have left the group. A second Ctrl-C does not interrupt it."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in INTERRUPTS}
    try:
        _end(process, grace_s)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(process: psutil.Popen, grace_s: float) -> None:
    strays: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):  # it has ended; its group may still have members
        strays = process.children(recursive=True)
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + patience_s
        left = _alive(process.pid, strays)
        for member in left:
            # A descendant outside the group has a parent in it, which ends it in its own way if there is time.
            if number == signal.SIGKILL or member not in strays or _group_of(member) == process.pid:
                with suppress(psutil.NoSuchProcess):
                    member.send_signal(number)
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            left = _alive(process.pid, strays)
    process.wait()


def _alive(group: int, strays: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the members of a process group and these others, without those that have ended."""
    members = [other for other in psutil.process_iter() if _group_of(other) == group]
    members += [stray for stray in strays if stray not in members]
    alive = []
    for member in members:
        with suppress(psutil.NoSuchProcess):
            if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                alive.append(member)
    return alive


def _group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except (ProcessLookupError, PermissionError):
        return None


def _judged(code: int, results: Path, junit: Path, log: Path) -> Outcome:
    """Return the verdict of a stage that has ended by itself."""
    try:
        if junit.exists():
            return _judged_tests(code, junit, log)
        found = json.loads(results.read_text())["parts"]
        figures = [figure for part in found.values() for figure in part["figures"]]
    except (OSError, ValueError, KeyError, TypeError, ET.ParseError):
        return Outcome(ERROR, f"exit code {code} without results; {log.name} ends: {_last(log)}")
    missed = [
        f"{f['name']} = {f['value']:.4g}, {f['goal']} wanted{': ' if f['note'] else ''}{f['note']}"
        for f in figures
        if f["met"] is False
    ]
    if missed:
        return Outcome(FAIL, "; ".join(missed), figures=figures)
    if code or not figures:
        return Outcome(ERROR, f"exit code {code}; {log.name} ends: {_last(log)}", figures=figures)
    return Outcome(PASS, figures=figures)


def _judged_tests(code: int, junit: Path, log: Path) -> Outcome:
    suite = next(ET.parse(junit).getroot().iter("testsuite"))
    cases = list(suite.iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case.find("skipped") for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(bad) - len(skipped)
    goal = f">= {len(cases) - len(skipped)}"
    figure = {"name": "tests passed", "value": passed, "unit": "", "goal": goal, "met": not bad, "note": ""}
    if bad:
        names = ", ".join(str(case.get("name")) for case in bad[:3])
        return Outcome(FAIL, f"{len(bad)} failed: {names}{' ...' if len(bad) > 3 else ''}", figures=[figure])
    if code not in (0, _NO_TESTS):
        return Outcome(ERROR, f"pytest ended with exit code {code}; {log.name} ends: {_last(log)}", figures=[figure])
    if not passed:
        reasons = {str(skip.get("message")) for skip in skipped if skip is not None}
        return Outcome(SKIPPED, "; ".join(sorted(reasons))) if skipped else Outcome(ERROR, "no test was found")
    return Outcome(PASS, figures=[figure])


def _last(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "(empty)"


def missing(stage: Stage, device: str, gpus_gib: Sequence[float | None]) -> str:
    """Return what this machine lacks for a stage; "": nothing.

    Args:
        gpus_gib: the memory of each visible GPU; None: unknown, and taken as enough.
    """
    if device == "cpu":
        return "no form without a GPU" if stage.cpu is None else ""
    if len(gpus_gib) < stage.n_gpus:
        return f"needs {stage.n_gpus} GPUs, and {len(gpus_gib)} are visible"
    smallest = min((gib for gib in gpus_gib[: stage.n_gpus] if gib is not None), default=None)
    if smallest is not None and smallest < stage.min_gib:
        return f"needs {stage.min_gib} GiB of GPU memory, and the GPU has {smallest:.1f}"
    return ""


def run_all(
    stages: Sequence[Stage], run: Callable[[Stage], Outcome], gpus_gib: Sequence[float | None], device: str,
    before: Callable[[Stage], None], after: Callable[[Stage, Outcome], None],
) -> dict[str, Outcome]:  # fmt: skip
    """Run the stages in order; a failed one does not stop the next. One for which something is `missing` is skipped.

    Args:
        before, after: called around each stage, also a skipped one.

    Raises:
        KeyboardInterrupt: Ctrl-C; the stage is over, and `after` has been called with it.
    """
    outcomes: dict[str, Outcome] = {}
    for stage in stages:
        before(stage)
        outcome = Outcome(ERROR, "interrupted")
        try:
            lack = missing(stage, device, gpus_gib)
            outcome = Outcome(SKIPPED, lack) if lack else run(stage)
        finally:
            outcomes[stage.name] = outcome
            after(stage, outcome)
    return outcomes
