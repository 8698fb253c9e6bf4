"""Starts the worker processes, restarts those that die, and ends them with the server.

A slot is one place for a worker: a teacher and a group of GPUs. Its process is the same `worker`
command that joins from another host.
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
from teacher_server.errors import ServerError
from teacher_server.log import LogFormat
from teacher_server.worker.gpus import WorkerPlan

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3  # in a row, of one slot, once a worker of it was ready
MAX_EXCLUSIONS = 3  # in a row, of one slot: then it is its card, or its copy of the model
_GOOD_TIME_S = 600.0  # an exclusion after this long is the first of a new row
_LAST_WORDS_S = 5.0  # for an excluded worker to end by itself
_LEAVE_S = 10.0  # for a dismissed one
_TERMINATE_S = 1.0
_STDERR = 2


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """What all workers of this server have in common."""

    endpoint: str  # the broker's, for local workers
    compute_timeout_s: float
    log_format: LogFormat

    def argv(self, plan: WorkerPlan, name: str) -> list[str]:
        """The command line of one worker."""
        teacher = plan.teacher
        options = {
            "broker": self.endpoint,
            "model": teacher.model,
            "teacher": teacher.name,
            "name": name,
            "engine": teacher.engine,
            "device": teacher.device,
            "dtype": teacher.dtype,
            "tensor-parallel-size": teacher.tensor_parallel_size,
            "threads": teacher.threads,
            "max-tokens": teacher.max_tokens,
            "max-batch-tokens": teacher.max_batch_tokens,
            "gpu-memory-utilization": teacher.gpu_memory_utilization,
            "compute-timeout-s": self.compute_timeout_s,
            "log-format": self.log_format,
            "parent-pid": os.getpid(),
        }
        if plan.gpus:
            options["gpus"] = ",".join(plan.gpus)
        flags = [part for option, value in options.items() for part in (f"--{option}", str(value))]
        return [sys.executable, "-m", "teacher_server", "worker", *flags]


@dataclass(slots=True)
class _Slot:
    index: int
    plan: WorkerPlan
    process: subprocess.Popen[bytes]
    name: str
    n_started: int = 1
    n_failed: int = 0  # starts in a row that did not end in `ready`
    n_excluded: int = 0  # in a row
    ready_s: float | None = None  # since when
    was_ready: bool = False  # it, or one before it in this slot
    dismissed: bool = False  # on purpose: drained by name, and about to end
    kill_s: float | None = None  # at this time, if it has not ended by itself
    left: bool = False  # and nobody takes its place

    @property
    def where(self) -> str:
        gpus = f" on GPU {','.join(self.plan.gpus)}" if self.plan.gpus else ""
        return f"{self.name} (teacher {self.plan.teacher.name}{gpus})"


class Supervisor:
    """Owns the worker processes of this host. Only the main thread may call it.

    The kernel kills a worker when the thread that started it ends (PR_SET_PDEATHSIG), so no worker
    outlives the server however it dies; this is why it must be the main thread.
    """

    def __init__(self, command: WorkerCommand, plans: Sequence[WorkerPlan], broker: Broker) -> None:
        self.drained = False  # the broker has answered its last request
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
    def all_ready(self) -> bool:
        return all(slot.ready_s is not None or slot.dismissed or slot.left for slot in self._slots)

    def check(self) -> None:
        """Note the broker's news, restart who died; call it a few times a second.

        Raises:
            ServerError: a worker cannot be started, its model is refused, it sends bad data again and again,
                or the broker has died.
        """
        if not self._broker.alive:
            raise ServerError("the broker thread has died; its last words are in the log above")
        while not self._broker.events.empty():
            event = self._broker.events.get()
            self.drained = self.drained or event.kind == "drained"
            for slot in [slot for slot in self._slots if slot.name == event.name]:
                self._note(slot, event.kind, event.text)
        for slot in self._slots:
            if slot.kill_s is not None and time.monotonic() > slot.kill_s:
                slot.process.kill()
            if not slot.left and slot.process.poll() is not None:
                self._on_end(slot)

    def _note(self, slot: _Slot, kind: str, text: str) -> None:
        now_s = time.monotonic()
        if kind == "ready":
            slot.ready_s, slot.n_failed, slot.was_ready = now_s, 0, True
        elif kind == "dismissed":
            slot.dismissed = True
            slot.kill_s = slot.kill_s or now_s + _LEAVE_S  # not later if it is told again
        elif kind == "refused" and slot.kill_s is None:  # else its last hello crossed our farewell
            raise ServerError(f"worker {slot.where} may not join: {text}")
        elif kind == "excluded":
            worked_s = 0.0 if slot.ready_s is None else now_s - slot.ready_s
            slot.n_excluded = slot.n_excluded + 1 if worked_s < _GOOD_TIME_S else 1
            if slot.n_excluded >= MAX_EXCLUSIONS:
                raise ServerError(
                    f"worker {slot.where} was excluded {slot.n_excluded} times in a row, now because {text}. Fix: look "
                    "for a bad card or a damaged copy of the model; leave that GPU out with --gpus."
                )
            slot.kill_s = now_s + _LAST_WORDS_S

    def _on_end(self, slot: _Slot) -> None:
        code = slot.process.returncode
        self._broker.worker_died(slot.name)
        if code == 0 or slot.dismissed:  # whatever an engine's end makes of the exit code
            slot.left = True
            log.info("worker %s has left", slot.where)
            return
        slot.n_failed += slot.ready_s is None
        if not slot.was_ready or slot.n_failed >= MAX_FAILED_STARTS:
            raise ServerError(f"worker {slot.where} ended with code {code} before it was ready; see its lines above")
        log.warning("worker %s ended with code %d; starting another", slot.where, code)
        slot.process, slot.name = self._spawn(slot.index, slot.plan, slot.n_started)
        slot.n_started += 1
        slot.ready_s = slot.kill_s = None

    def _spawn(self, index: int, plan: WorkerPlan, n_started: int) -> tuple[subprocess.Popen[bytes], str]:
        name = f"w{index}.{n_started}"  # a restarted worker is another one: late news of the first must not hit it
        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        argv = self._command.argv(plan, name)
        # What an engine prints goes to stderr: stdout has the ready line and nothing else.
        return subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=_STDERR), name

    def stop(self) -> None:
        """End every worker; at most about one second, then by SIGKILL."""
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
