"""`python -m teacher_server`: command line -> checks -> broker and workers -> ready line -> a signal or a drain.

This is the server's wiring; nobody imports it but `main`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from teacher_server.broker.broker import Broker
from teacher_server.broker.metrics import BrokerMetrics, serve_metrics
from teacher_server.cli.supervisor import Supervisor, WorkerCommand
from teacher_server.config.options import N_WORKERS, SERVER_OPTIONS, TEACHER_OPTIONS, add_flags
from teacher_server.config.settings import ServerSettings, TeacherSettings, read_settings
from teacher_server.errors import ServerError
from teacher_server.log import log_to_stderr
from teacher_server.wire.keys import load_server_keys
from teacher_server.wire.private_endpoint import private_endpoint
from teacher_server.worker.gpus import NO_GPUS, find_gpus, may_need_gpus, plan_workers
from teacher_server.worker.model_folder import inspect_model_folder

log = logging.getLogger(__name__)

_CHECK_S = 0.1  # also how late a signal may be obeyed
_LAST_WORDS_S = 1.0  # after a drain: for clients and `drain --wait` to hear that nothing is left
_EXAMPLES = """commands, each with its own --help:
  serve (or nothing)   this one
  worker               join a server with one more copy of its model, from any host
  status               a table of workers, GPUs, queues and times
  drain                let a server or one worker finish its work and leave
  keygen               keys for a server, its clients and its workers

examples:
  a teacher on this machine's CPU, for a first run:
    python -m teacher_server --model models/tiny --port 15555

  two model copies on four GPUs, reachable from other hosts for those who have a key:
    python -m teacher_server keygen keys --client trainer
    python -m teacher_server --model /models/teacher --gpus 4,5,6,7 --tensor-parallel-size 2 \\
        --max-batch-tokens 32768 --host 10.0.0.5 --keys keys

  two teachers, a GPU each; a request names its own:
    python -m teacher_server --teacher math=/models/math --teacher code=/models/code --gpus 0,1

  everything in a file; flags override it:
    python -m teacher_server --config teacher.yaml --port 15600

  from a script: any free port, wait for the file, which names it:
    python -m teacher_server --model models/tiny --port 0 --ready-file run/teacher.json

signals: SIGTERM and SIGINT stop it at once, SIGUSR1 drains it.
exit code: 0 after a signal or a drain, 2 after an error (one line on stderr)
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m teacher_server",
        description="Serve one or several teacher models to the trainer.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="PATH", help="the only teacher: model folder (config.json, *.safetensors)")
    parser.add_argument(
        "--teacher", action="append", metavar="NAME=PATH", help="one of several; without =PATH its workers join"
    )
    parser.add_argument("--config", metavar="FILE", help="YAML with any of these settings, and `teachers:`")
    add_flags(parser, (*TEACHER_OPTIONS, N_WORKERS), "each teacher")
    add_flags(parser, SERVER_OPTIONS, "the server")
    return parser


class _Signals:
    """Flags that the main loop reads: `stop` after SIGINT or SIGTERM, `drain` after SIGUSR1.

    A handler may run inside any call of the main thread, one that holds a lock included; so it takes none.
    """

    def __init__(self) -> None:
        self.stop = self.drain = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_drain)

    def _on_stop(self, number: int, frame: object) -> None:
        self.stop = True

    def _on_drain(self, number: int, frame: object) -> None:
        self.drain = True


class Server:
    """Everything between the checks and the last process's end.

    Raises:
        ServerError: it cannot start, or cannot go on.
    """

    def __init__(self, settings: ServerSettings, signals: _Signals, stack: contextlib.ExitStack) -> None:
        self._settings, self._signals = settings, signals
        plans = plan_workers(settings, find_gpus(os.environ) if may_need_gpus(settings) else NO_GPUS)
        fingerprints = {teacher.name: _fingerprint(teacher) for teacher in settings.teachers}
        keys = load_server_keys(settings.keys) if settings.keys else None
        if settings.ready_file is not None:
            _check_ready_file(settings.ready_file)
        registry = CollectorRegistry()
        endpoint = private_endpoint(stack)
        self._broker = Broker(
            settings.address,
            settings.port,
            endpoint,
            worker_port=settings.worker_port,
            max_queue_bytes=settings.max_queue_mib << 20,
            worker_timeout_s=settings.worker_timeout_s,
            keys=keys,
            metrics=BrokerMetrics(registry),
            teachers=fingerprints,
        )
        self._broker.start()
        stack.callback(self._broker.stop)
        self._metrics_port: int | None = None
        if settings.metrics_port is not None:
            metrics = serve_metrics(settings.metrics_host, settings.metrics_port, self._broker, registry)
            stack.callback(metrics.stop)
            self._metrics_port = metrics.port
        if settings.ready_file is not None:  # the port is ours, so what a file of this name says is out of date
            _remove(settings.ready_file)
            stack.callback(_remove, settings.ready_file)
        command = WorkerCommand(endpoint, settings.compute_timeout_s, settings.log_format)
        self._supervisor = Supervisor(command, plans, self._broker)
        stack.callback(self._supervisor.stop)
        log.info("listening on tcp://%s:%d, loading %d workers", settings.address, self._broker.port, len(plans))
        if self._broker.worker_port is not None:
            log.info("workers of other hosts: --broker %s:%d", settings.address, self._broker.worker_port)

    def run(self) -> None:
        """Until a signal or the end of a drain."""
        started_s, ready, draining, drained_s = time.monotonic(), False, False, float("inf")
        while not self._signals.stop:
            time.sleep(_CHECK_S)
            self._supervisor.check()
            if not ready and self._is_ready():
                ready = True
                log.info("ready after %.1f s", time.monotonic() - started_s)
                self._announce()
            if self._signals.drain and not draining:
                draining = True
                log.info("SIGUSR1: draining")
                self._broker.drain()
            if self._supervisor.drained:
                drained_s = min(drained_s, time.monotonic())
                if time.monotonic() - drained_s > _LAST_WORDS_S:
                    log.info("drained")
                    return
        log.info("stopping")

    def _is_ready(self) -> bool:
        """All own workers have loaded, and each teacher has a worker from somewhere."""
        return self._supervisor.all_ready and all(t.n_workers for t in self._broker.snapshot().teachers)

    def _announce(self) -> None:
        """One line on stdout and, if asked for, a file that appears whole."""
        settings, broker = self._settings, self._broker
        teachers = broker.snapshot().teachers
        n_workers = sum(teacher.n_workers for teacher in teachers)
        names = ",".join(teacher.model_name for teacher in teachers)
        print(f"ready: tcp://{settings.address}:{broker.port} model={names} n_workers={n_workers}", flush=True)
        if settings.ready_file is None:
            return
        ready: dict[str, Any] = {
            "host": settings.address,
            "port": broker.port,
            "worker_port": broker.worker_port,
            "metrics_port": self._metrics_port,
            "pid": os.getpid(),
            "worker_pids": self._supervisor.pids,
            "fingerprints": {teacher.name: teacher.model_fingerprint for teacher in teachers},
        }
        if len(teachers) == 1:
            ready["fingerprint"] = teachers[0].model_fingerprint
        partial = _partial(settings.ready_file)
        try:
            partial.write_text(json.dumps(ready) + "\n")
            partial.replace(settings.ready_file)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ServerError(f"--ready-file {settings.ready_file}: {error}.") from error


def _fingerprint(teacher: TeacherSettings) -> str:
    """Which model its workers must hold; empty if only the hosts they join from have the folder. Raises ServerError."""
    if teacher.n_workers == 0 and not (teacher.model and Path(teacher.model).is_dir()):
        return ""
    return inspect_model_folder(teacher.model, needs_weights=teacher.engine != "trivial").fingerprint


def _partial(ready_file: Path) -> Path:
    return ready_file.with_name(f"{ready_file.name}.{os.getpid()}.partial")


def _check_ready_file(file: Path) -> None:
    """Whether it can be written, before anything loads; what is there stays. Raises ServerError."""
    try:
        if file.is_dir():
            raise ServerError(f"--ready-file {file}: this is a folder. Fix: name a file in it.")
        file.parent.mkdir(parents=True, exist_ok=True)
        _partial(file).touch()
        _partial(file).unlink()
    except OSError as error:
        raise ServerError(f"--ready-file {file}: {error}. Fix: name a file that can be written.") from error


def _remove(ready_file: Path) -> None:
    try:
        ready_file.unlink(missing_ok=True)
    except OSError as error:
        log.error("--ready-file %s cannot be removed: %s", ready_file, error)


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 after a signal or a drain. Raises ServerError."""
    settings = read_settings(build_parser().parse_args(argv))
    signals = _Signals()
    log_to_stderr("server", settings.log_format)
    with contextlib.ExitStack() as stack:
        Server(settings, signals, stack).run()
    return 0
