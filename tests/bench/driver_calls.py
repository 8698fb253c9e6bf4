"""Record what the driver's threads do around Ray: for bench_pipeline, which divides with it what no process computes.

    python -m tests.bench.driver_calls CALLS.npz --config X.yaml [key=value ...]     as gkd.main_gkd, recorded

Kinds: "Ray calls" submit a call; "serialisation" reads or stores objects, in the driver or around a method in another
process (from `ray.timeline`); "methods" are other processes in a method; "in transit": the driver waits for a call or a
result that Ray has; "queue": for another thread of its own. Of the rest of its main thread, "Python" is the CPU time,
and "no processor" the time without one: other processes or threads had the core or the interpreter's lock.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

CALLS, SERIALISATION, TRANSIT, QUEUE = "Ray calls", "serialisation", "in transit", "queue"
PYTHON, METHODS, NO_PROCESSOR, UNKNOWN = "Python", "methods", "no processor", "not recorded"
# Module:attribute -> kind. A call inside another one does not count on its own.
HOOKS = {
    "ray.actor:ActorMethod._remote": CALLS,
    "ray:get": SERIALISATION,
    "ray:put": SERIALISATION,
    "ray:wait": TRANSIT,
    "ray:ObjectRefGenerator.__next__": TRANSIT,
    "threading:Condition.wait": QUEUE,
    "gkd.rollout.driver.dispatcher:JobStream.finished": QUEUE,
}
KINDS = (CALLS, SERIALISATION, TRANSIT, QUEUE)
_ENDLESS = "stream"  # an engine's method that runs as long as its stream
_REPORTED_S = 2.5  # Ray's processes report their events every second
Interval = tuple[float, float]
Call = tuple[int, float, float, float, float]  # kind, start, end, CPU time of the thread at the start and the end


def wrap(place: str, make: Callable[[Any], Any]) -> None:
    """Replace module:attribute.attribute by `make` of it."""
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    holder = importlib.import_module(module)
    for attribute in outer:
        holder = getattr(holder, attribute)
    setattr(holder, name, make(getattr(holder, name)))


class DriverCalls:
    """The calls of this process since the last `take`, on the wall clock. There is one per process: it changes Ray."""

    def __init__(self) -> None:
        self._main: list[Call] = []
        self._others: list[Call] = []
        self._inside = threading.local()
        for place, kind in HOOKS.items():
            wrap(place, lambda called, kind=kind: self._recorded(called, KINDS.index(kind)))

    def _recorded(self, called: Callable[..., Any], kind: int) -> Callable[..., Any]:
        main = threading.main_thread().ident

        def recorded(*args: Any, **kwargs: Any) -> Any:
            inside = self._inside.__dict__
            if inside.get("call"):
                return called(*args, **kwargs)
            inside["call"] = True
            began_s, began_cpu_s = time.time(), time.thread_time()
            try:
                return called(*args, **kwargs)
            finally:
                calls = self._main if threading.get_ident() == main else self._others
                calls.append((kind, began_s, time.time(), began_cpu_s, time.thread_time()))
                inside["call"] = False

        return recorded

    def take(self, file: Path) -> None:
        """Write the calls since the last `take`, and what Ray recorded of other processes."""
        main, self._main = self._main, []
        others, self._others = self._others, []
        time.sleep(_REPORTED_S)
        since_s = min((call[1] for call in main), default=0.0)
        methods, around = [], []
        for event in ray.timeline():
            start_s, kind = event["ts"] / 1e6, str(event["cat"])
            interval = (start_s, start_s + event["dur"] / 1e6)
            if start_s >= since_s and kind in ("task:deserialize_arguments", "task:store_outputs"):
                around.append(interval)
            elif start_s >= since_s and kind.startswith("task::") and event["name"] != _ENDLESS:
                methods.append(interval)
        arrays = {"main": main, "others": others, "methods": methods, "around": around}
        np.savez(file, **{name: np.array(rows) for name, rows in arrays.items()})


def read_calls(file: Path) -> list[tuple[str, list[Interval]]]:
    """Return the intervals of each kind, in order of precedence: where two overlap, the first one counts."""
    with np.load(file) as found:
        main, others = (found[name].reshape(-1, 5) for name in ("main", "others"))
        methods, around = ([(a, b) for a, b in found[name].reshape(-1, 2)] for name in ("methods", "around"))

    def of(calls: np.ndarray, kind: str) -> list[Interval]:
        return [(a, b) for a, b in calls[calls[:, 0] == KINDS.index(kind), 1:3]]

    # The time between successive calls of the main thread is divided by its CPU time there.
    ends, starts = main[:-1, 2], main[1:, 1]
    middle = ends + np.clip(main[1:, 3] - main[:-1, 4], 0.0, starts - ends)
    return [
        *((kind, of(main, kind)) for kind in (CALLS, SERIALISATION)),
        (PYTHON, list(zip(ends, middle, strict=True))),
        (NO_PROCESSOR, list(zip(middle, starts, strict=True))),
        # The main thread waits. In a queue it waits for what another thread may be calling.
        (SERIALISATION, around),
        (METHODS, methods),
        *((kind, of(others, kind)) for kind in (CALLS, SERIALISATION)),
        (TRANSIT, of(main, TRANSIT)),
        (TRANSIT, of(others, TRANSIT)),
        (QUEUE, of(main, QUEUE)),
    ]


def main(argv: Sequence[str]) -> int:
    from gkd import main_gkd

    file, calls = Path(argv[0]), DriverCalls()

    def shutdown(called: Callable[..., Any]) -> Callable[..., Any]:
        def taken(*args: Any, **kwargs: Any) -> Any:
            if ray.is_initialized():
                calls.take(file)
            return called(*args, **kwargs)

        return taken

    wrap("ray:shutdown", shutdown)
    return main_gkd.main(list(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
