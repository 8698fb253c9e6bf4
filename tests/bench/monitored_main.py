"""Run `gkd.main_gkd` and account the driver's CPU time to parts of its monitoring.

    python -m tests.bench.monitored_main RESULT.json --config X.yaml [key=value ...]

Each function of a part is wrapped: it counts the CPU time of its thread, once where it calls another one of the part,
less that of an empty function in the same wrapper. Start-up and end of the run do not count.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from gkd import main_gkd
from tests.bench.driver_calls import wrap

# Part -> its functions, as module:attribute.attribute.
PARTS: dict[str, tuple[str, ...]] = {
    "activities": (
        *("gkd.spans:SpanRecorder._show", "gkd.spans:SpanRecorder.add"),
        *("gkd.spans:SpanRecorder.doing", "gkd.spans:SpanRecorder.span", "gkd.spans:SpanRecorder.done"),
    ),
    "state, step line": (
        "gkd.console.state:RunState.add",
        "gkd.metrics.run_metrics:step_line",
        "gkd.metrics.run_metrics:log.info",
    ),
    "panel, heartbeat": (
        *("gkd.console.terminal:Terminal.tick", "rich.live:Live.refresh"),
        "rich.file_proxy:FileProxy.write",
    ),
    "metrics files": ("gkd.metrics.writer:MetricsWriter.write",),
    "health checks": ("gkd.metrics.health:HealthResponse.numbers",),
    "TensorBoard, without its thread": ("gkd.metrics.trackers:Trackers.log",),
}

_CALLS = 10000  # of an empty function, to measure the wrapper


class Account:
    """CPU seconds by part, while `is_open`."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = defaultdict(float)
        self.is_open = False
        self._inside = threading.local()
        self._empty_s = 0.0
        empty = self.function("nothing", lambda: None)
        self.is_open = True
        for _ in range(_CALLS):
            empty()
        self._empty_s = self.cpu_s.pop("nothing") / _CALLS
        self.is_open = False

    def function(self, part: str, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        inside, cpu_s = self._inside, self.cpu_s

        def counted(*args: Any, **kwargs: Any) -> Any:
            if part in inside.__dict__ or not self.is_open:
                return wrapped(*args, **kwargs)
            inside.__dict__[part] = True
            time.thread_time()  # the first call after a pause is slower, and would count for the function
            began_s = time.thread_time()
            try:
                return wrapped(*args, **kwargs)
            finally:
                cpu_s[part] += time.thread_time() - began_s - self._empty_s
                del inside.__dict__[part]

        return counted


def children_cpu_s() -> float:
    """Return the CPU time of all living descendants: the ranks, the engines and Ray's processes."""
    total_s = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            total_s += used.user + used.system
    return total_s


def main() -> int:
    result, *arguments = sys.argv[1:]
    account, fitted = Account(), {}
    for part, places in PARTS.items():
        for place in places:
            wrap(place, lambda wrapped, part=part: account.function(part, wrapped))

    def timed(fit: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any) -> None:
            account.is_open, others_s = True, children_cpu_s()
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            fit(*args)
            account.is_open = False
            fitted.update(cpu_s=time.process_time() - cpu_s, wall_s=time.perf_counter() - wall_s)
            fitted["children_cpu_s"] = children_cpu_s() - others_s

        return counted

    wrap("gkd.main_gkd:Trainer.fit", timed)
    code = main_gkd.main(arguments)
    Path(result).write_text(json.dumps({"driver": fitted, "parts": account.cpu_s}))
    return code


if __name__ == "__main__":
    sys.exit(main())
