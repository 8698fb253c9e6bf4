"""How far a process's memory grows while something runs. Linux only."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

_SAMPLE_S = 0.001


class PeakMeter:
    """`peak_bytes`: the most that was resident within the context, beyond what was resident at its start.

    The kernel keeps the peak, and lets a process reset it. Where it may not, a thread looks every millisecond.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0

    def __enter__(self) -> PeakMeter:
        gc.collect()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._start = self._sampled = _status_bytes("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except PermissionError:
            self._thread = threading.Thread(target=self._sample)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        peak = _status_bytes("VmHWM") if self._thread is None else self._sampled
        self.peak_bytes = peak - self._start

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._sampled = max(self._sampled, _status_bytes("VmRSS"))


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: it takes Linux to measure memory here")
