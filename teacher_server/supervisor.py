"""Starts the worker processes, restarts those that die, and ends them with the server."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from teacher_server.broker import Broker
from teacher_server.errors import ServerError
from teacher_server.worker import WorkerSettings

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3  # in a row, of one worker, once the server is up
_TERMINATE_S = 1.0


@dataclass(slots=True)
class _Slot:
    index: int
    process: subprocess.Popen[bytes]
    name: str
    n_started: int = 1
    n_failed: int = 0  # starts in a row that did not end in `ready`
    ready: bool = False


class Supervisor:
    """Owns `n_workers` worker processes. Only the main thread may call it.

    The kernel kills a worker when the thread that started it ends (PR_SET_PDEATHSIG), so no worker
    outlives the server however it dies; this is why it must be the main thread.
    """

    def __init__(self, settings: WorkerSettings, n_workers: int, broker: Broker) -> None:
        self._settings = settings
        self._broker = broker
        self._slots = [_Slot(index, *self._spawn(index, 0)) for index in range(n_workers)]
        self._was_ready = False

    @property
    def pids(self) -> list[int]:
        return [slot.process.pid for slot in self._slots]

    @property
    def all_ready(self) -> bool:
        return all(slot.ready for slot in self._slots)

    def check(self) -> None:
        """Note who is ready, restart who died; call it a few times a second.

        Raises:
            ServerError: a worker cannot be started, its model is refused, or the broker has died.
        """
        if not self._broker.alive:
            raise ServerError("the broker thread has died; its last words are in the log above")
        while not self._broker.events.empty():
            event = self._broker.events.get()
            if event.kind == "refused":
                raise ServerError(f"worker {event.name}: {event.text}")
            for slot in self._slots:
                if slot.name == event.name:
                    slot.ready, slot.n_failed = True, 0
        self._was_ready = self._was_ready or self.all_ready
        for slot in self._slots:
            if slot.process.poll() is not None:
                self._restart(slot)

    def _restart(self, slot: _Slot) -> None:
        code = slot.process.returncode
        self._broker.worker_died(slot.name)
        slot.n_failed += not slot.ready
        if not self._was_ready or slot.n_failed >= MAX_FAILED_STARTS:
            raise ServerError(f"worker {slot.name} ended with code {code} before it was ready; see its lines above")
        log.warning("worker %s ended with code %d; starting another", slot.name, code)
        slot.process, slot.name = self._spawn(slot.index, slot.n_started)
        slot.n_started += 1
        slot.ready = False

    def _spawn(self, index: int, n_started: int) -> tuple[subprocess.Popen[bytes], str]:
        name = f"w{index}.{n_started}"  # a restarted worker is another one: late news of the first must not hit it
        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = str(self._settings.threads)  # read by OpenMP when torch is imported
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads}
        return subprocess.Popen(self._settings.argv(name, index), env=env, stdin=subprocess.DEVNULL), name

    def stop(self) -> None:
        """End every worker; at most about one second, then by SIGKILL."""
        for slot in self._slots:
            slot.process.terminate()
        deadline_s = time.monotonic() + _TERMINATE_S
        for slot in self._slots:
            try:
                slot.process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                slot.process.kill()
                slot.process.wait()
