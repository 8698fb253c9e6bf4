"""Run gkd.main_gkd and kill it with SIGKILL at a given point.

    python -m tests.e2e.killed_main POINT NTH AFTER_S VICTIM [POINT NTH AFTER_S VICTIM ...] -- <arguments of main_gkd>

VICTIM is killed AFTER_S seconds after the NTH visit of POINT (0: immediately). It is `all` processes of the run, the
`driver` alone, an `actor` rank, a rollout `engine`, or an `engine_child` that vLLM started for another GPU. A
`stopped_engine` or `stopped_engine_child` gets SIGSTOP instead of SIGKILL.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from gkd import main_gkd
from gkd.metrics.run_metrics import StepMetrics
from gkd.metrics.writer import MetricsWriter
from gkd.run.folder import RunFolder

STAGES = ("data", "switch", "rollout", "teacher", "train", "weight_sync", "checkpoint", "eval")
# All calls that make a file visible under its final name, the metrics writer, and the export.
CALLS: dict[str, tuple[Any, str]] = {
    "metrics": (MetricsWriter, "write"),
    "export": (RunFolder, "publish_export"),
    "rename": (Path, "rename"),
    "replace": (Path, "replace"),
}
POINTS = (*STAGES, *(f"{edge}_{name}" for name in CALLS for edge in ("before", "after")))
VICTIMS = {"actor": "ActorWorker", "engine": "RolloutWorker"}  # which end the run, unless engines are restarted
DONE = "killed_main: signal sent to"  # in the output, so that a run that ended for another reason is not taken for it
OTHER_VICTIMS = ("all", "driver", "engine_child", "stopped_engine", "stopped_engine_child")
Fault = tuple[str, int, float, str]  # point, its visit, seconds after it, victim


def with_faults(command: list[str], faults: Sequence[Fault]) -> list[str]:
    """Return the command of a run as the command of a run with these faults."""
    words = [str(word) for fault in faults for word in fault]
    return [sys.executable, "-m", "tests.e2e.killed_main", *words, "--", *command[3:]] if faults else command


def family_until_end(process: subprocess.Popen[Any], limit_s: float) -> dict[int, psutil.Process]:
    """Wait until a run ends, `limit_s` at most, and return the processes that it started, by id."""
    family: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(psutil.NoSuchProcess):
            family |= {p.pid: p for p in psutil.Process(process.pid).children(recursive=True)}
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    return family


def generation_of(step: int) -> int:
    """Return the visit of the stage `rollout` that generates under `sync`: the second of three in a step."""
    return 3 * step - 1


class Killer:
    """Count the visits of one point, and kill the victim at the n-th."""

    def __init__(self, point: str, nth: int, after_s: float, victim: str) -> None:
        self._point, self._left, self._after_s, self._victim = point, nth, after_s, victim

    def visit(self, point: str) -> None:
        if point != self._point:
            return
        self._left -= 1
        if self._left:
            return
        if self._after_s > 0:
            timer = threading.Timer(self._after_s, self._kill)
            timer.daemon = True
            timer.start()
        else:
            self._kill()

    def _kill(self) -> None:
        me = psutil.Process()
        family = me.children(recursive=True)
        kind = self._victim.removeprefix("stopped_").removesuffix("_child")
        if kind in VICTIMS:
            # Ray titles its actors by their class, and by their method while one runs.
            chosen = [p for p in family if VICTIMS[kind] in " ".join(p.cmdline())]
            if self._victim.endswith("_child"):
                chosen = [p for p in (chosen[0].children(recursive=True) if chosen else ()) if is_engine_child(p)]
            if not chosen:
                os._exit(70)  # an exception in this thread would go unnoticed
            chosen[0].send_signal(signal.SIGSTOP if self._victim.startswith("stopped_") else signal.SIGKILL)
            print(DONE, self._victim, flush=True)
            return
        if self._victim == "all":
            for process in family:
                with suppress(psutil.NoSuchProcess):  # it has ended since the list was made
                    process.kill()
        os.kill(me.pid, signal.SIGKILL)


def is_engine_child(process: psutil.Process) -> bool:
    """Return whether vLLM has spawned this process."""
    return any("spawn_main" in word for word in process.cmdline()) or "VLLM::" in process.name()


def install(killer: Killer) -> None:
    """Wrap the run's functions so that each reports its point to the killer. Several killers can be installed."""
    enter_stage = StepMetrics.stage

    def stage(self: StepMetrics, name: str) -> Any:
        killer.visit(name)
        return enter_stage(self, name)

    StepMetrics.stage = stage  # type: ignore[method-assign]
    for point, (owner, name) in CALLS.items():
        setattr(owner, name, _reporting(getattr(owner, name), point, killer))


def _reporting(call: Callable[..., Any], point: str, killer: Killer) -> Callable[..., Any]:
    @functools.wraps(call)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        killer.visit(f"before_{point}")
        result = call(*args, **kwargs)
        killer.visit(f"after_{point}")
        return result

    return reporting


if __name__ == "__main__":
    end = sys.argv.index("--")
    words, arguments = sys.argv[1:end], sys.argv[end + 1 :]
    for point, nth, after_s, victim in zip(words[::4], words[1::4], words[2::4], words[3::4], strict=True):
        if point not in POINTS or victim not in (*OTHER_VICTIMS, *VICTIMS):
            sys.exit(f"points: {', '.join(POINTS)}; victims: {', '.join((*OTHER_VICTIMS, *VICTIMS))}")
        install(Killer(point, int(nth), float(after_s), victim))
    sys.exit(main_gkd.main(arguments))
