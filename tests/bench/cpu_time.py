"""CPU seconds of processes and their descendants over time, by process kind."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

import psutil

_EVERY_S = 0.2
# What the title of a process contains -> kind, first match. Ray's workers have the name of their actor's class.
_KINDS = {
    "RolloutWorker": "engine",
    "ActorWorker": "actor",
    "ScoringEndpoint": "endpoint",
    "gkd.scoring.reward.worker": "reward",
    "gkd.environment.worker": "environment",
    "raylet": "ray",
    "gcs_server": "ray",
    "ray::": "ray",
    "/ray/": "ray",
    "teacher_server": "teacher server",
    "gkd.main_gkd": "driver",
    "trl_run": "TRL",
}


class CpuTime:
    """Sample in a thread, as a context manager. `between` interpolates.

    Args:
        pids: processes to measure with their descendants; none: the descendants of this process.
    """

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._roots = [psutil.Process(pid) for pid in pids]
        self._samples: list[tuple[float, dict[tuple[int, str], float]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CpuTime:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def between(self, start_s: float, end_s: float) -> dict[str, float]:
        """Return process kind -> CPU seconds between two times of `time.time()`."""
        used: defaultdict[str, float] = defaultdict(float)
        for (t0, before), (t1, after) in zip(self._samples, self._samples[1:], strict=False):
            share = (min(t1, end_s) - max(t0, start_s)) / (t1 - t0)
            if share > 0:
                for key, seconds in after.items():
                    used[key[1]] += share * (seconds - before.get(key, 0.0))
        return dict(used)

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            used = {}
            for process in self._processes():
                try:
                    times, title = process.cpu_times(), " ".join(process.cmdline())
                except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                    continue  # it has ended since the list was made
                used[process.pid, _kind(title)] = times.user + times.system
            self._samples.append((time.time(), used))

    def _processes(self) -> Iterator[psutil.Process]:
        yield from self._roots
        for root in self._roots or [psutil.Process()]:
            with suppress(psutil.NoSuchProcess):  # it has ended
                yield from root.children(recursive=True)


def _kind(title: str) -> str:
    return next((kind for part, kind in _KINDS.items() if part in title), "other")
