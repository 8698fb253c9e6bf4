"""`gkd teacher`: check the settings, start broker and workers, print `ready:`, run until a signal.

This module connects the parts of the server. Only `main` imports it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from teacher_server.broker.broker import Broker
from teacher_server.broker.metrics import serve_metrics
from teacher_server.cli.ready_file import ReadyFile
from teacher_server.cli.supervisor import Supervisor, WorkerCommand
from teacher_server.config.command import command_parser, gkd_words
from teacher_server.config.declare import is_path
from teacher_server.config.schema import N_WORKERS, SERVER_OPTIONS, TEACHER_OPTIONS, ServerSettings, TeacherSettings
from teacher_server.config.settings import add_flags, read_settings
from teacher_server.engines.hub import local_path
from teacher_server.log import log_to_stderr
from teacher_server.wire.keys import load_server_keys
from teacher_server.wire.sockets import private_endpoint
from teacher_server.worker.gpus import NO_GPUS, find_gpus, may_need_gpus, plan_workers
from teacher_server.worker.model_folder import inspect_model_folder

log = logging.getLogger(__name__)

_CHECK_S = 0.1  # time between two checks, and so the largest delay of a signal
_SAY_S = 5.0  # between two lines about workers that load
_DRAIN_END_S = 1.0  # time after a drain in which clients and `drain --wait` learn that no request is left
_EXAMPLES = """commands, each with its own --help:
  serve (or nothing)   run the server: this help
  worker               add one more copy of the model to a running server, from any host
  status               show workers, GPUs, queues and times
  drain                let a server or one worker finish its work and exit
  keygen               create keys for a server, its clients and its workers
  http                 answer HTTP clients of vLLM and SGLang (TRL, prime-rl, slime) with a running server's teachers

examples:
  a teacher on this machine's CPU, for a first run:
    gkd teacher --model models/quickstart/teacher --port 15555

  two model copies on four GPUs, reachable from other hosts with a key:
    gkd teacher keygen keys --client trainer
    gkd teacher --model /models/teacher --gpus 4,5,6,7 --tensor-parallel-size 2 \\
        --max-batch-tokens 32768 --host 10.0.0.5 --keys keys

  two teachers, one GPU each; a request names its teacher:
    gkd teacher --teacher math=/models/math --teacher code=/models/code --gpus 0,1

  settings in a file; flags override it:
    gkd teacher --config teacher.yaml --port 15600

  in a script: use any free port and wait for the file, which contains the port:
    gkd teacher --model models/quickstart/teacher --port 0 --ready-file run/teacher.json

signals: SIGTERM and SIGINT stop the server at once; SIGUSR1 drains it.
exit code: 0 after a signal or a drain, 2 after an error (one line on stderr)
"""


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "gkd teacher", "Serve one or several teacher models to the trainer.", _EXAMPLES, allow_abbrev=False
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="model of a single teacher: a folder (config.json, *.safetensors), or ORG/NAME[@REVISION] on the hub",
    )
    parser.add_argument(
        "--teacher",
        action="append",
        metavar="NAME=PATH",
        help="one of several teachers; without =PATH all its workers join from other hosts",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these settings and `teachers:`")
    add_flags(parser, (*TEACHER_OPTIONS, N_WORKERS), "each teacher")
    add_flags(parser, SERVER_OPTIONS, "the server")
    return parser


class _Signals:
    """Flags for the main loop: `stop` after SIGINT or SIGTERM, `drain` after SIGUSR1.

    A handler may run inside any call of the main thread, even one that holds a lock, so it takes no lock.
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
    """The running server: broker, metrics and worker processes, which `stack` ends. Raises ServerError as its parts."""

    def __init__(self, settings: ServerSettings, signals: _Signals, stack: contextlib.ExitStack) -> None:
        self._settings = settings
        self._signals = signals
        plans = plan_workers(settings, find_gpus(os.environ) if may_need_gpus(settings) else NO_GPUS)
        fingerprints = {teacher.name: _fingerprint(teacher) for teacher in settings.teachers}
        keys = load_server_keys(settings.keys) if settings.keys else None
        self._ready_file = ReadyFile(settings.ready_file)
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
            registry=registry,
            teachers=fingerprints,
        )
        self._broker.start()
        stack.callback(self._broker.stop)
        self._metrics_port: int | None = None
        if settings.metrics_port is not None:
            where = settings.metrics_host, settings.metrics_port
            self._metrics_port = serve_metrics(stack, *where, self._broker.snapshot, registry)
        self._ready_file.remove()  # this process owns the port now, so an existing file is out of date
        stack.callback(self._ready_file.remove)
        command = WorkerCommand(endpoint, settings.compute_timeout_s, settings.log_format)
        self._supervisor = Supervisor(command, plans, self._broker)
        stack.callback(self._supervisor.stop)
        log.info("listening on tcp://%s:%d, loading %d workers", settings.address, self._broker.port, len(plans))
        if self._broker.worker_port is not None:
            log.info("workers of other hosts: --broker %s:%d", settings.address, self._broker.worker_port)

    def run(self) -> None:
        """Run until a signal or the end of a drain."""
        started_s = said_s = time.monotonic()
        ready = draining = False
        drained_s = float("inf")
        while not self._signals.stop:
            time.sleep(_CHECK_S)
            self._supervisor.check()
            if not ready and self._is_ready():
                ready = True
                log.info("ready after %.1f s", time.monotonic() - started_s)
                self._announce()
            if not ready and (now_s := time.monotonic()) - said_s >= _SAY_S:
                said_s = now_s
                n = self._supervisor.n_loading
                log.info("loading for %.0f s; workers that are not ready: %d", now_s - started_s, n)
            if self._signals.drain and not draining:
                draining = True
                log.info("SIGUSR1: draining")
                self._broker.drain()
            if self._supervisor.drained:
                drained_s = min(drained_s, time.monotonic())
                if time.monotonic() - drained_s > _DRAIN_END_S:
                    log.info("drained")
                    return
        log.info("stopping")

    def _is_ready(self) -> bool:
        """Return whether all local workers have loaded and each teacher has at least one worker."""
        return not self._supervisor.n_loading and all(t.n_workers for t in self._broker.snapshot().teachers)

    def _announce(self) -> None:
        """Print the ready line and the status command on stdout, and write the ready file atomically."""
        settings = self._settings
        broker = self._broker
        teachers = broker.snapshot().teachers
        n_workers = sum(teacher.n_workers for teacher in teachers)
        names = ",".join(teacher.model_name for teacher in teachers)
        ready_line = f"ready: tcp://{settings.address}:{broker.port} model={names} n_workers={n_workers}"
        status = status_command(settings.address, broker.port, settings.keys)
        print(f"{ready_line}\nstatus: {status}", flush=True)
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
        self._ready_file.write(ready)


def status_command(address: str, port: int, keys: str | None) -> str:
    """Return the command line that shows the status of this server.

    With keys it names a client's bundle of the key folder; `NAME` stands for it if no bundle is left there.
    """
    host = "127.0.0.1" if address == "0.0.0.0" else address
    words = [*gkd_words(), "teacher", "status", "--server", f"{host}:{port}"]
    if keys is not None:
        bundles = sorted(file.parent for file in Path(keys).glob("bundles/*/client.key_secret"))
        words += ["--keys", str(bundles[0] if bundles else Path(keys, "bundles", "NAME"))]
    return shlex.join(words)


def _downloaded(teacher: TeacherSettings) -> TeacherSettings:
    """Return the teacher with the folder of its model, which may be named as on the hub. Raises ServerError."""
    if teacher.n_workers == 0:  # they join from other hosts
        return teacher
    return replace(teacher, model=local_path(teacher.model, weights=not is_path(teacher.engine), notice=log.info))


def _fingerprint(teacher: TeacherSettings) -> str:
    """Return the model fingerprint that workers must have; empty if this host lacks the folder. Raises ServerError."""
    if teacher.n_workers == 0 and not (teacher.model and Path(teacher.model).is_dir()):
        return ""
    return inspect_model_folder(teacher.model, needs_weights=not is_path(teacher.engine)).fingerprint


def main(argv: Sequence[str]) -> int:
    """Run the server and return the exit code: 0 after a signal or a drain. Raises ServerError."""
    settings = read_settings(build_parser().parse_args(argv))
    log_to_stderr("server", settings.log_format)
    settings = replace(settings, teachers=tuple(map(_downloaded, settings.teachers)))
    signals = _Signals()  # during a download a signal ends the process
    with contextlib.ExitStack() as stack:
        Server(settings, signals, stack).run()
    return 0
