"""Start the local worker processes, restart those that die, and end them with the server.

A slot is a teacher and a group of GPUs, and runs one worker process at a time. The process runs the
same `worker` command that is used on other hosts.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from teacher_server.broker.broker import Broker
from teacher_server.config.schema import TEACHER_OPTIONS
from teacher_server.config.settings import flag_of
from teacher_server.errors import ServerError
from teacher_server.worker.gpus import WorkerPlan

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3  # consecutive, of one slot, after a worker of the slot was ready once
MAX_EXCLUSIONS = 3  # consecutive, of one slot: then its GPU or its copy of the model is at fault
_GOOD_TIME_S = 600.0  # after a worker ran this long, the count of exclusions starts again
_EXCLUDED_EXIT_S = 5.0  # time for an excluded worker to exit before SIGKILL
_DISMISSED_EXIT_S = 10.0  # time for a dismissed worker to exit before SIGKILL
_TERMINATE_S = 1.0
_STDERR = 2


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """Command line of the local workers; the fields are common to all of them."""

    endpoint: str  # broker's endpoint for local workers
    compute_timeout_s: float
    log_format: str

    def argv(self, plan: WorkerPlan, name: str) -> list[str]:
        """Return the command line of one worker."""
        teacher = plan.teacher
        values = {
            flag_of(option.name): getattr(teacher, option.name) for option in TEACHER_OPTIONS if option.name != "gpus"
        }
        values |= {
            "--broker": self.endpoint,
            "--model": teacher.model,
            "--teacher": teacher.name,
            "--name": name,
            "--compute-timeout-s": self.compute_timeout_s,
            "--log-format": self.log_format,
            "--parent-pid": os.getpid(),
        }
        if plan.gpus:
            values["--gpus"] = ",".join(plan.gpus)
        words = [
            word
            for flag, value in values.items()
            for word in ((flag, str(value)) if not isinstance(value, bool) else (flag,) * value)
        ]
        return [sys.executable, "-m", "teacher_server", "worker", *words]


@dataclass(slots=True)
class _Slot:
    index: int
    plan: WorkerPlan
    process: subprocess.Popen[bytes]
    name: str
    n_started: int = 1
    n_failed: int = 0  # consecutive starts that ended before `ready`
    n_excluded: int = 0  # consecutive
    ready_s: float | None = None  # when the current process became ready
    was_ready: bool = False  # the current or an earlier process of this slot was ready
    dismissed: bool = False  # drained by name: the slot stays empty after it
    kill_s: float | None = None  # kill the process at this time if it is still running
    left: bool = False  # the slot is empty and stays empty

    @property
    def label(self) -> str:
        gpus = f" on GPU {','.join(self.plan.gpus)}" if self.plan.gpus else ""
        return f"{self.name} (teacher {self.plan.teacher.name}{gpus})"


class Supervisor:
    """Own the worker processes of this host. Only the main thread may call it.

    The kernel kills a worker when the thread that started it ends (PR_SET_PDEATHSIG). Workers are therefore
    started by the main thread, and no worker outlives the server, even if the server is killed.
    """

    def __init__(self, command: WorkerCommand, plans: Sequence[WorkerPlan], broker: Broker) -> None:
        self.drained = False  # the broker is draining and has completed its last request
        self._command = command
        self._broker = broker
        self._slots: list[_Slot] = []
        try:
            for index, plan in enumerate(plans):
                self._slots.append(_Slot(index, plan, *self._spawn(index, plan, 0)))
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> list[int]:
        return [slot.process.pid for slot in self._slots if not slot.left]

    @property
    def n_loading(self) -> int:
        return sum(slot.ready_s is None and not slot.dismissed and not slot.left for slot in self._slots)

    def check(self) -> None:
        """Process the broker's events and restart dead workers. Call it a few times per second.

        Raises:
            ServerError: if a worker cannot be started, its model is refused, it repeatedly sends bad data,
                or the broker thread has died.
        """
        if not self._broker.alive:
            raise ServerError("the broker thread has died; see its error in the log above")
        while not self._broker.events.empty():
            event = self._broker.events.get()
            self.drained = self.drained or event.kind == "drained"
            for slot in [slot for slot in self._slots if slot.name == event.name]:
                self._on_event(slot, event.kind, event.text)
        for slot in self._slots:
            if slot.kill_s is not None and time.monotonic() > slot.kill_s:
                slot.process.kill()
            if not slot.left and slot.process.poll() is not None:
                self._on_exit(slot)

    def _on_event(self, slot: _Slot, kind: str, text: str) -> None:
        now_s = time.monotonic()
        if kind == "ready":
            slot.ready_s = now_s
            slot.n_failed = 0
            slot.was_ready = True
        elif kind == "leaving":
            slot.dismissed = True
        elif kind in ("dismissed", "left"):  # drained by name, or by a signal from outside
            slot.dismissed = slot.dismissed or kind == "dismissed"
            slot.kill_s = slot.kill_s or now_s + _DISMISSED_EXIT_S  # a second event does not extend it
        elif kind == "refused" and slot.kill_s is None:  # else the worker sent this hello before it was dismissed
            raise ServerError(f"worker {slot.label} cannot join: {text}")
        elif kind == "excluded":
            worked_s = 0.0 if slot.ready_s is None else now_s - slot.ready_s
            slot.n_excluded = slot.n_excluded + 1 if worked_s < _GOOD_TIME_S else 1
            if slot.n_excluded >= MAX_EXCLUSIONS:
                raise ServerError(
                    f"worker {slot.label} was excluded {slot.n_excluded} times in a row, last because {text}. Fix: "
                    "check for a faulty GPU or a damaged copy of the model; leave that GPU out with --gpus."
                )
            slot.kill_s = now_s + _EXCLUDED_EXIT_S

    def _on_exit(self, slot: _Slot) -> None:
        code = slot.process.returncode
        self._broker.worker_died(slot.name)
        if slot.dismissed:  # whatever the code: an engine's shutdown may change it
            slot.left = True
            log.info("worker %s has left", slot.label)
            return
        slot.n_failed += slot.ready_s is None
        if not slot.was_ready or slot.n_failed >= MAX_FAILED_STARTS:
            raise ServerError(f"worker {slot.label} exited with code {code} before it was ready; see its log above")
        log.warning("worker %s exited with code %d; restarting it", slot.label, code)
        slot.process, slot.name = self._spawn(slot.index, slot.plan, slot.n_started)
        slot.n_started += 1
        slot.ready_s = slot.kill_s = None

    def _spawn(self, index: int, plan: WorkerPlan, n_started: int) -> tuple[subprocess.Popen[bytes], str]:
        name = f"w{index}.{n_started}"  # a new name per process: late events of the old one must not match the new
        root = str(Path(__file__).resolve().parents[2])  # so that a worker finds the package, wherever it was started
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        # Send what an engine prints to stderr: stdout is reserved for the ready lines.
        return subprocess.Popen(self._command.argv(plan, name), env=env, stdin=subprocess.DEVNULL, stdout=_STDERR), name

    def stop(self) -> None:
        """Terminate every worker, and kill those that are still running after about one second."""
        running = [slot.process for slot in self._slots if slot.process.poll() is None]
        for process in running:
            process.terminate()
        deadline_s = time.monotonic() + _TERMINATE_S
        for process in running:
            try:
                process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
