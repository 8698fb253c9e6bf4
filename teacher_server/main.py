"""Command line -> checks -> broker and workers -> ready line -> serve until a signal.

This is the server's only wiring; nobody imports it but `__main__`.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from teacher_server.broker import Broker
from teacher_server.errors import ServerError
from teacher_server.model_folder import ModelFolder, inspect_model_folder
from teacher_server.server_log import log_to_stderr
from teacher_server.supervisor import Supervisor
from teacher_server.worker import WorkerSettings

log = logging.getLogger(__name__)

_MAX_UNIX_PATH = 107  # sockaddr_un.sun_path
_CHECK_S = 0.1
_EXAMPLES = """examples:
  a teacher on this machine's CPU, for a first run:
    python -m teacher_server --model models/tiny --port 15555

  four workers on four GPUs, reachable from the trainer's host in a trusted network:
    python -m teacher_server --model /models/teacher --n-workers 4 --device cuda --dtype bfloat16 \\
        --max-batch-tokens 32768 --host 10.0.0.5 --allow-remote

  from a script: any free port, wait for the file, which names it:
    python -m teacher_server --model models/tiny --port 0 --ready-file run/teacher.json
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m teacher_server",
        description="Serve a teacher model's top-k logprobs to the trainer.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, metavar="PATH", help="model folder (config.json, *.safetensors)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=15555, help="port; 0 picks a free one (default: 15555)")
    parser.add_argument("--allow-remote", action="store_true", help="needed to listen on another than a loopback host")
    parser.add_argument("--n-workers", type=int, default=1, help="model copies, one process each (default: 1)")
    parser.add_argument("--engine", default="hf", choices=["hf"], help="what runs the model (default: hf)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="(default: auto)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="(default: float32)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker (default: 1)")
    parser.add_argument(
        "--max-batch-tokens", type=int, default=8192, metavar="N", help="padded tokens of a batch (default: 8192)"
    )
    parser.add_argument("--max-queue-mib", type=int, default=256, metavar="N", help="waiting requests (default: 256)")
    parser.add_argument("--ready-file", type=Path, metavar="F", help="written when ready: JSON with host, port, pids")
    return parser


class _StopSignal:
    """SIGINT and SIGTERM as a flag the main loop waits on."""

    def __init__(self) -> None:
        self._event = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)


def check_settings(args: argparse.Namespace) -> str:
    """The IPv4 address to listen on. Raises ServerError naming the flag that is wrong."""
    for flag, value, low, high in (
        ("--port", args.port, 0, 65535),
        ("--n-workers", args.n_workers, 1, 1024),
        ("--threads", args.threads, 1, 1024),
        ("--max-batch-tokens", args.max_batch_tokens, 2, 1 << 24),
        ("--max-queue-mib", args.max_queue_mib, 1, 1 << 20),
    ):
        if not low <= value <= high:
            raise ServerError(f"{flag} {value}: must be {low} to {high}.")
    try:
        address = socket.getaddrinfo(args.host, None, socket.AF_INET)[0][4][0]
    except OSError as error:
        raise ServerError(f"--host {args.host}: not an IPv4 address or known name ({error}).") from error
    if not ipaddress.ip_address(address).is_loopback and not args.allow_remote:
        raise ServerError(
            f"--host {args.host}: reachable from other machines, and the protocol has no authentication. "
            "Fix: use 127.0.0.1, or add --allow-remote in a trusted network."
        )
    return str(address)


def announce_ready(args: argparse.Namespace, host: str, broker: Broker, model: ModelFolder, pids: list[int]) -> None:
    """One line on stdout and, if asked for, a file that appears whole."""
    print(f"ready: tcp://{host}:{broker.port} model={model.name} n_workers={len(pids)}", flush=True)
    if args.ready_file is not None:
        ready = {"host": host, "port": broker.port, "pid": os.getpid(), "worker_pids": pids}
        args.ready_file.parent.mkdir(parents=True, exist_ok=True)
        partial = args.ready_file.with_name(f"{args.ready_file.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(ready | {"fingerprint": model.fingerprint}) + "\n")
        partial.replace(args.ready_file)


def serve(args: argparse.Namespace, stop: _StopSignal) -> None:
    """Everything between the checks and the last process's end. Raises ServerError."""
    host = check_settings(args)
    model = inspect_model_folder(args.model)
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="teacher_server.")  # mode 0700: only this user's processes can be workers
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        backend = os.path.join(folder, "workers")
        if len(backend) > _MAX_UNIX_PATH:
            raise ServerError(f"{backend} is too long for a socket path. Fix: set TMPDIR to a shorter folder.")
        broker = Broker(host, args.port, f"ipc://{backend}", args.max_queue_mib << 20)
        broker.start()
        stack.callback(broker.stop)
        if args.ready_file is not None:  # the port is ours, so what a file of this name says is out of date
            args.ready_file.unlink(missing_ok=True)
            stack.callback(args.ready_file.unlink, missing_ok=True)
        settings = WorkerSettings(
            connect=f"ipc://{backend}",
            model=model.path,
            engine=args.engine,
            device=args.device,
            dtype=args.dtype,
            threads=args.threads,
            max_batch_tokens=args.max_batch_tokens,
        )
        supervisor = Supervisor(settings, args.n_workers, broker)
        stack.callback(supervisor.stop)
        _watch(args, stop, host, broker, supervisor, model)


def _watch(
    args: argparse.Namespace, stop: _StopSignal, host: str, broker: Broker, supervisor: Supervisor, model: ModelFolder
) -> None:
    started_s = time.monotonic()
    log.info("listening on tcp://%s:%d, loading %s in %d workers", host, broker.port, model.name, args.n_workers)
    announced = False
    while not stop.wait(_CHECK_S):
        supervisor.check()
        if not announced and supervisor.all_ready:
            announced = True
            log.info("ready after %.1f s", time.monotonic() - started_s)
            announce_ready(args, host, broker, model, supervisor.pids)
    log.info("stopping")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 after a signal, 2 after a ServerError (one line on stderr)."""
    args = build_parser().parse_args(argv)
    stop = _StopSignal()
    log_to_stderr("server")
    try:
        serve(args, stop)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
