"""Run stages, each as a process group of its own with a time limit: alone on the GPU, or several that share it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from gkd.tools.gpu_proof.judge import ERROR, PASS, SKIPPED, TIMED_OUT, Outcome, headline, judged, last_line
from gkd.tools.gpu_proof.schedule import Room, in_order, next_up, started_ahead
from gkd.tools.gpu_proof.stage import JSON, XML, Stage
from gkd.tools.gpu_proof.turn import TURN

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Place:
    """Where stages run.

    Args:
        device: "cuda" | "cpu".
        root: the repository.
        out: folder of results and logs; the output of a stage goes to `<stage>.log`.
        gpus_gib: memory of each visible GPU; None means unknown, which is taken as enough for one stage at a time.
        grace_s: from SIGTERM to SIGKILL. A run of the whole system stops its own processes.
    """

    device: str
    root: Path
    out: Path
    gpus_gib: tuple[float | None, ...] = ()
    cores: int = 1
    grace_s: float = 20.0

    @property
    def room(self) -> Room:
        if self.device == "cpu":
            return Room(self.cores, float("inf"))
        return Room(self.cores, min((gib or 0.0 for gib in self.gpus_gib), default=0.0))


class Started:
    """A stage with a process. It has the GPU from `begin` on."""

    def __init__(self, stage: Stage, place: Place) -> None:
        self.stage, self._place = stage, place
        self._json, self._xml, self._log, self._turn = (
            place.out / f"{stage.name}.{kind}" for kind in ("json", "xml", "log", "turn")
        )
        for file in (self._json, self._xml, self._turn):
            file.unlink(missing_ok=True)
        files = {JSON: str(self._json), XML: str(self._xml)}
        self._command = [sys.executable, "-m", *(files.get(word, word) for word in stage.words(place.device))]
        more = {"GKD_TEST_DEVICE": place.device} | ({TURN: str(self._turn)} if stage.ahead_s else {})
        self._began = 0.0
        self.process = _process(self._command, place, self._log, more)

    def begin(self) -> None:
        self._began = time.monotonic()
        self._turn.touch()

    def over(self) -> bool:
        return self.process.poll() is not None or time.monotonic() - self._began > self.stage.limit_s

    def outcome(self) -> Outcome:
        """End it, and judge it."""
        in_time = self.process.poll() is not None
        _stop([self.process], self._place.grace_s)
        self._turn.unlink(missing_ok=True)
        found = judged(self.process.returncode, self._json, self._xml, self._log)
        if found.verdict == PASS and headline(found.figures, self.stage.figure) is None:
            found.verdict, found.reason = ERROR, f"it has measured no figure named {self.stage.figure!r}"
        if not in_time:
            end = f"{self._log.name} ends: {last_line(self._log)}"
            found.verdict, found.reason = TIMED_OUT, f"stopped after {self.stage.limit_s} s; {end}"
        found.seconds, found.command = round(time.monotonic() - self._began, 1), self._command
        return found


def run_all(
    stages: Sequence[Stage], place: Place, before: Callable[[Stage], None], after: Callable[[Stage, Outcome], None]
) -> dict[str, Outcome]:
    """Run the stages, see `in_order` and `next_up`; a failed one does not stop others. Call it in the main thread.

    A stage for which something is `missing` is skipped. Whatever ends this call, Ctrl-C included, no process is left.

    Args:
        before, after: called around each stage, also a skipped one.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; `after` has been called with each stage that had begun.
    """
    outcomes: dict[str, Outcome] = {}

    def finish(stage: Stage, outcome: Outcome) -> None:
        outcomes[stage.name] = outcome
        after(stage, outcome)

    runnable = [stage for stage in stages if not missing(stage, place.device, place.gpus_gib)]
    for stage in stages:
        if stage not in runnable:
            before(stage)
            finish(stage, Outcome(SKIPPED, missing(stage, place.device, place.gpus_gib)))
    waiting, running, ahead = in_order(runnable), list[Started](), list[Started]()
    on_gpu = place.device == "cuda"  # elsewhere the stages need the cores themselves
    with _noted_interrupts() as check, prepared(runnable if on_gpu else [], place) as is_ready:
        try:
            while waiting or running:
                ready = [stage for stage in waiting if is_ready(stage)]
                while following := next_up(ready, [one.stage for one in running], place.room):
                    ready.remove(following)
                    waiting.remove(following)
                    before(following)
                    early = [one for one in ahead if one.stage is following]
                    ahead = [one for one in ahead if one.stage is not following]
                    running += early or [Started(following, place)]
                    running[-1].begin()
                if on_gpu and not ahead and (following := started_ahead(waiting, place.room)):
                    ahead.append(Started(following, place))
                time.sleep(_POLL_S)
                check()
                for one in [one for one in running if one.over()]:
                    running.remove(one)
                    finish(one.stage, one.outcome())
        finally:
            _stop([one.process for one in running + ahead], place.grace_s)
            for one in running:
                finish(one.stage, Outcome(ERROR, "interrupted"))
    return outcomes


@contextmanager
def _noted_interrupts() -> Iterator[Callable[[], None]]:
    """Note INTERRUPTS while processes run, so that none is lost; yield a function that raises KeyboardInterrupt then.

    Another Ctrl-C does not interrupt what ends the processes.
    """
    noted: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in INTERRUPTS}

    def check() -> None:
        if noted:
            raise KeyboardInterrupt

    try:
        yield check
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def prepared(stages: Sequence[Stage], place: Place) -> Iterator[Callable[[Stage], bool]]:
    """Start what these stages prepare, in the background, without a GPU; yield a function that tells if it is complete.

    A stage whose preparation fails or takes longer than its limit makes the same itself. At the end of the context,
    Ctrl-C included, what still runs is stopped. Its output goes to `<stage>.prepare.log`.
    """
    first = {stage.prepare: stage for stage in reversed(stages) if stage.prepare}
    began, running = time.monotonic(), dict[tuple[str, ...], psutil.Popen]()

    def is_ready(stage: Stage) -> bool:
        process = running.get(stage.prepare)
        if process is None:
            return True
        if process.poll() is None and time.monotonic() - began < stage.limit_s:
            return False
        _stop([running.pop(stage.prepare)], place.grace_s)
        return True

    try:
        for words, stage in first.items():
            log = place.out / f"{stage.name}.prepare.log"
            running[words] = _process([sys.executable, "-m", *words], place, log, {"CUDA_VISIBLE_DEVICES": ""})
        yield is_ready
    finally:
        _stop(list(running.values()), place.grace_s)


def _process(command: Sequence[str], place: Place, log: Path, more: dict[str, str]) -> psutil.Popen:
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"} | more
    with log.open("wb") as output:
        return psutil.Popen(
            command, cwd=place.root, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def _stop(processes: Sequence[psutil.Popen], grace_s: float) -> None:
    """End processes, their groups, and descendants that have left the groups."""
    groups, strays = {process.pid for process in processes}, list[psutil.Process]()
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has ended; its group may still have members
            strays += process.children(recursive=True)
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + patience_s
        left = _alive(groups, strays)
        for member in left:
            # A descendant outside the groups has a parent in one, which ends it in its own way if there is time.
            if number == signal.SIGKILL or member not in strays or _group_of(member) in groups:
                with suppress(psutil.NoSuchProcess):
                    member.send_signal(number)
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            left = _alive(groups, strays)
    for process in processes:
        process.wait()


def _alive(groups: set[int], strays: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the members of process groups and these others, without processes that have ended."""
    members = [other for other in psutil.process_iter() if _group_of(other) in groups]
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


def missing(stage: Stage, device: str, gpus_gib: Sequence[float | None]) -> str:
    """Return what this machine lacks for a stage; "": nothing.

    Args:
        gpus_gib: the memory of each visible GPU; None means unknown, which is taken as enough.
    """
    if device == "cpu":
        return "no form without a GPU" if stage.cpu is None else ""
    if len(gpus_gib) < stage.n_gpus:
        return f"needs {stage.n_gpus} GPUs, and {len(gpus_gib)} are visible"
    smallest = min((gib for gib in gpus_gib[: stage.n_gpus] if gib is not None), default=None)
    if smallest is not None and smallest < stage.min_gib:
        return f"needs {stage.min_gib} GiB of GPU memory, and the GPU has {smallest:.1f}"
    return ""
