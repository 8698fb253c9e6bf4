"""Find rollout engines that hang, or that died while idle, and report them as lost."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from gkd.cluster.calls import fetch
from gkd.errors import GkdError, RankFailed, RankTimeout
from gkd.log import get_logger
from gkd.rollout.driver.recovery import Engines
from gkd.rollout.messages import Pulse

log = get_logger("recovery")

_POLL_S = 5.0
_REPLY_S = 1.0  # a healthy engine replies within milliseconds


@dataclass(slots=True)
class _Watched:
    """Hold what is known of one process."""

    worker: Any
    moved_s: float  # clock when the engine last had no work, or finished a pass
    n_passes: int = -1
    call: Any = None  # without a reply


class EngineWatch:
    """Asks each engine for its pulse, in a thread, until `close`.

    Args:
        limit_s: an engine hangs if for this time it does not reply, or finishes no pass while it has work.
    """

    def __init__(self, engines: Engines, limit_s: float) -> None:
        self._engines, self._limit_s = engines, limit_s
        self._poll_s = min(_POLL_S, limit_s / 4)
        self._watched: dict[int, _Watched] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch engines", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; waits for it for a moment. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(2 * _REPLY_S)

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._ended.wait(self._poll_s):
            if time.monotonic() - last_s > self._limit_s / 2 + self._poll_s:  # this process was stopped meanwhile
                self._watched.clear()
            try:
                self._poll()
            except GkdError as error:
                if self._engines.has_failed:  # the run ends; the training loop raises the error
                    return
                log.warning("checking the rollout engines failed and is repeated: %s", str(error))
            except (RayError, RuntimeError, ConnectionError) as error:
                if not self._ended.is_set():
                    log.warning("engines are not watched any more: %s: %s", type(error).__name__, str(error))
                return
            last_s = time.monotonic()

    def _poll(self) -> None:
        for index, worker in self._engines.up().items():
            known = self._watched.get(index)
            if known is None or known.worker != worker:
                known = self._watched[index] = _Watched(worker, time.monotonic())
            if known.call is None:
                known.call = worker.pulse.remote()
        calls = {known.call: index for index, known in self._watched.items() if known.call is not None}
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_REPLY_S) if calls else ([], [])
        for ref in done:
            self._read(calls[ref])
        for index, known in list(self._watched.items()):
            still_s = time.monotonic() - known.moved_s
            if still_s > self._limit_s:
                what = "did not reply" if known.call is not None else f"finished no pass after pass {known.n_passes}"
                self._lost(index, RankTimeout(f"it hangs: it {what} for {still_s:.0f} s (rollout.hang_timeout_s)"))

    def _read(self, index: int) -> None:
        known = self._watched[index]
        call, known.call = known.call, None
        try:
            pulse: Pulse = fetch(call, f"pulse of rollout engine {index}")
        except RankFailed as error:
            self._lost(index, error)
            return
        if pulse.is_idle or pulse.n_passes != known.n_passes:
            known.n_passes, known.moved_s = pulse.n_passes, time.monotonic()

    def _lost(self, index: int, cause: GkdError) -> None:
        self._engines.lost(index, self._watched.pop(index).worker, cause)
