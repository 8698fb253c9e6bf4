"""`gkd teacher status` and `drain`: inspect a running server, and shut it down without losing work."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import msgspec

from teacher_server.client.admin import AdminLink, ConnectionClosed, NoReply
from teacher_server.config.command import command_parser
from teacher_server.config.settings import server_endpoint
from teacher_server.errors import SettingsError
from teacher_server.wire.keys import load_peer_keys
from teacher_server.wire.status import Gpu, ServerStatus

_POLL_S = 0.2
_DEFAULT_HOST = "127.0.0.1"
_DEFAULT_PORT = "15555"
_CLEAR = "\x1b[H\x1b[2J"  # cursor home, clear screen
_STATUS_EXAMPLES = """examples:
  gkd teacher status
  gkd teacher status --port 15600
  gkd teacher status --server 10.0.0.5:15555 --keys bundles/trainer --watch
  gkd teacher status --json | jq '.workers[].tokens_per_s'

After `ready:` the server prints the `status` command with its address and keys.

exit code: 0 (also if Ctrl-C ends --watch), 2 if the server does not reply (one line on stderr states the reason),
130 if Ctrl-C ends it without --watch
"""
_DRAIN_EXAMPLES = """examples:
  let the whole server finish its work and exit; return when it has exited:
    gkd teacher drain --wait
  one worker, by its name in the status table:
    gkd teacher drain --worker w0.0 --wait

exit code: 0 done (without --wait: draining has started), 1 the server died before its work was finished, or the worker
was lost, 2 an error, including no reply for --timeout seconds during --wait, 130 if Ctrl-C ends it
"""


def _parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    parser = command_parser(f"gkd teacher {command}", description, examples, allow_abbrev=False)
    parser.add_argument(
        "--server", metavar="HOST:PORT", help=f"address of the server (default: {_DEFAULT_HOST}:{_DEFAULT_PORT})"
    )
    parser.add_argument("--host", metavar="HOST", help=f"short for --server HOST:{_DEFAULT_PORT}")
    parser.add_argument("--port", metavar="PORT", help=f"short for --server {_DEFAULT_HOST}:PORT")
    parser.add_argument("--keys", metavar="DIR", help="a client's key bundle, if the server runs with keys")
    parser.add_argument(
        "--timeout", default="5", metavar="S", help="seconds to wait for a reply (default: %(default)s)"
    )
    return parser


def _connect(args: argparse.Namespace) -> AdminLink:
    keys = load_peer_keys(args.keys, "client") if args.keys else None
    return AdminLink(_endpoint(args), keys, _seconds("--timeout", args.timeout))


def _endpoint(args: argparse.Namespace) -> str:
    """Return tcp://HOST:PORT from `--server`, or from `--host` and `--port`. Raises SettingsError."""
    if args.server and (args.host or args.port):
        raise SettingsError(f"--server {args.server} with --host or --port. Fix: use one of the two forms.")
    flag = "--server"
    address = (args.server or "").removeprefix("tcp://")
    if not address:
        flag = "--host/--port"
        address = f"{args.host or _DEFAULT_HOST}:{args.port or _DEFAULT_PORT}"
    return server_endpoint(flag, address)


def _seconds(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0.1 <= value <= 3600:
        raise SettingsError(f"{flag} {text}: not a number of seconds from 0.1 to 3600.")
    return value


def status(argv: Sequence[str]) -> int:
    """Print the status table and return the exit code. Raises ServerError."""
    parser = _parser("status", "Show the workers of a server, their GPUs, queues and times.", _STATUS_EXAMPLES)
    parser.add_argument("--watch", nargs="?", const="2", metavar="S", help="repeat every S seconds (default: 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --watch one per line")
    args = parser.parse_args(argv)
    every_s = _seconds("--watch", args.watch) if args.watch is not None else None
    with _connect(args) as link:
        try:
            _show_status(link, every_s, as_json=args.json)
        except KeyboardInterrupt:
            return 130 if every_s is None else 0  # Ctrl-C is how --watch ends
    return 0


def _show_status(link: AdminLink, every_s: float | None, *, as_json: bool) -> None:
    while True:
        now = link.status()
        if as_json:
            text = msgspec.json.encode(now).decode()
        else:
            text = status_table(link.endpoint, now)
            text = _CLEAR + text if every_s is not None and sys.stdout.isatty() else text
        print(text, flush=True)
        if every_s is None:
            return
        time.sleep(every_s)


def drain(argv: Sequence[str]) -> int:
    """Drain the server or one worker and return the exit code. Raises ServerError."""
    parser = _parser("drain", "Let a server, or one worker, finish its work and exit.", _DRAIN_EXAMPLES)
    parser.add_argument("--worker", default="", metavar="NAME", help="only this worker (default: the whole server)")
    parser.add_argument("--wait", action="store_true", help="wait until it has exited, and print the requests left")
    args = parser.parse_args(argv)
    target = f"worker {args.worker}" if args.worker else "the server"
    with _connect(args) as link:
        n_lost = link.status().n_lost_workers if args.worker else 0
        n_left = link.drain(args.worker)
        print(f"{target} accepts no new requests; {n_left} requests left", flush=True)
        if not args.wait:
            return 0
        if args.worker:
            if not _wait_for_worker(link, args.worker, n_left, n_lost):
                print(f"error: {target} was lost; other workers repeat its requests", file=sys.stderr)
                return 1
        elif (unfinished := _wait_for_server(link, n_left)) > 0:
            print(f"error: the server exited with {unfinished} requests left", file=sys.stderr)
            return 1
    print(f"{target} has exited", flush=True)
    return 0


def _wait_for_worker(link: AdminLink, name: str, n_left: int, n_lost: int) -> bool:
    """Return whether the worker was dismissed; `n_lost` workers were lost before. False: one was lost as it left."""
    while True:
        status = link.status()
        worker = next((worker for worker in status.workers if worker.name == name), None)
        if worker is None:
            return status.n_lost_workers == n_lost
        n_lost = status.n_lost_workers
        if worker.n_in_flight != n_left:
            n_left = worker.n_in_flight
            print(f"{n_left} requests left", flush=True)
        time.sleep(_POLL_S)


def _wait_for_server(link: AdminLink, n_left: int) -> int:
    """Return the requests left in the last reply. A drained server reports 0 for a second before it exits."""
    while True:
        time.sleep(_POLL_S)
        try:
            now_left = link.drain("")
        except ConnectionClosed:
            return n_left
        except NoReply as error:
            raise NoReply(f"the server has not exited; {n_left} requests left in its last reply. {error}") from error
        if now_left != n_left:
            n_left = now_left
            print(f"{n_left} requests left", flush=True)


# Format a `ServerStatus` as a human-readable table. Pure.

_WORKER_HEADS = (
    *("WORKER", "TEACHER", "STATE", "HOST:PID", "ENGINE", "DEVICE", "DTYPE"),
    *("IN FLIGHT", "TOKENS/S", "QUEUE", "COMPUTE", "HEARTBEAT", "GPUS"),
)
_SHORT = 12  # digits of a fingerprint that are shown; --json has all of them


def status_table(endpoint: str, status: ServerStatus) -> str:
    """Return totals, teachers, workers and excluded workers; columns are as wide as their longest cell."""
    has_all = all(teacher.n_workers for teacher in status.teachers)
    state = "draining" if status.draining else "serving" if has_all else "waiting for workers"
    errors = ", ".join(f"{count} {code}" for code, count in sorted(status.n_errors.items())) or "none"
    lines = [
        f"{endpoint}  {state}  up {_duration(status.uptime_s)}  server process {status.epoch[:8]}",
        f"completed {status.n_answered:,}   queued {status.n_queued:,} ({status.queued_bytes / 2**20:.1f} MiB)   "
        f"retried {status.n_retried:,}   workers lost {status.n_lost_workers}   errors {errors}   "
        f"tokens/s {sum(worker.tokens_per_s for worker in status.workers):,.0f}",
        "",
    ]
    lines += _table(
        ("TEACHER", "WORKERS", "QUEUED", "FINGERPRINT", "TOKENIZER", "MODEL"),
        [
            (
                teacher.name,
                str(teacher.n_workers),
                f"{teacher.n_queued:,}",
                teacher.model_fingerprint[:_SHORT] or "-",
                teacher.tokenizer_fingerprint[:_SHORT] or "-",
                teacher.model_path or "(no worker yet)",
            )
            for teacher in status.teachers
        ],
    )
    lines += [""] + _table(
        _WORKER_HEADS,
        [
            (
                worker.name,
                worker.teacher,
                worker.state,
                f"{worker.host}:{worker.pid}",
                worker.engine,
                worker.device,
                worker.dtype,
                f"{worker.n_in_flight} ({worker.tokens_in_flight:,} tokens)",
                f"{worker.tokens_per_s:,.0f}",
                f"{worker.queue_s:.3f} s",
                f"{worker.compute_s:.3f} s",
                f"{worker.last_heard_s:.1f} s ago",
                ", ".join(_gpu(gpu) for gpu in worker.gpus) or "-",
            )
            for worker in status.workers
        ],
    )
    lines += [_printable(f"excluded {name}: {why}") for name, why in status.excluded.items()]
    return "\n".join(lines)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[_printable(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _printable(text: str) -> str:
    """Replace control characters: a worker chooses its names and errors, and they must not control the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _gpu(gpu: Gpu) -> str:
    return " ".join(part for part in (gpu.id, gpu.uuid if gpu.uuid != gpu.id else "", gpu.name) if part)


def _duration(seconds: float) -> str:
    minutes = int(seconds // 60) % 60
    hours = int(seconds // 3600)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {int(seconds % 60)} s"
