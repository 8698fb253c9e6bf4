"""`python -m teacher_server status` and `drain`: look at a running server, and let it go in peace."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import msgspec

from teacher_server.cli.admin_link import AdminLink, Gone, NoAnswer
from teacher_server.cli.status_table import status_table
from teacher_server.config.settings import tcp_endpoint
from teacher_server.errors import SettingsError
from teacher_server.wire.keys import load_peer_keys

_POLL_S = 0.2
_CLEAR = "\x1b[H\x1b[2J"  # cursor home, screen empty
_STATUS_EXAMPLES = """examples:
  python -m teacher_server status
  python -m teacher_server status --server 10.0.0.5:15555 --keys bundles/trainer --watch
  python -m teacher_server status --json | jq '.workers[].tokens_per_s'

exit code: 0 (also if SIGINT, which is Ctrl-C, ends --watch), 2 if no server replies (one line on stderr says why),
130 if SIGINT ends it without --watch
"""
_DRAIN_EXAMPLES = """examples:
  let the whole server finish its work and end; come back when it has:
    python -m teacher_server drain --wait
  one worker, by its name in the status table:
    python -m teacher_server drain --worker w0.0 --wait

exit code: 0 done (without --wait: it has begun), 1 the server was gone before its work was, 2 an error,
also if the server is silent for --timeout while it is waited for, 130 if SIGINT, which is Ctrl-C, ends it
"""


def _parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m teacher_server {command}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--server", default="127.0.0.1:15555", metavar="HOST:PORT", help="(default: %(default)s)")
    parser.add_argument("--keys", metavar="DIR", help="a client's bundle, if the server runs with keys")
    parser.add_argument("--timeout", default="5", metavar="S", help="for one answer (default: %(default)s)")
    return parser


def _connect(args: argparse.Namespace) -> AdminLink:
    keys = load_peer_keys(args.keys, "client") if args.keys else None
    return AdminLink(tcp_endpoint("--server", args.server), keys, _seconds("--timeout", args.timeout))


def _seconds(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0.1 <= value <= 3600:
        raise SettingsError(f"{flag} {text}: not a number of seconds of 0.1 to 3600.")
    return value


def status(argv: Sequence[str]) -> int:
    """Raises ServerError."""
    parser = _parser("status", "Who works there, on which GPUs, and how busy is everyone?", _STATUS_EXAMPLES)
    parser.add_argument("--watch", nargs="?", const="2", metavar="S", help="again every S seconds (default: 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object; with --watch one a line")
    args = parser.parse_args(argv)
    every_s = _seconds("--watch", args.watch) if args.watch is not None else None
    with _connect(args) as link:
        try:
            _show_status(link, every_s, as_json=args.json)
        except KeyboardInterrupt:
            return 130 if every_s is None else 0  # the way to end --watch
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
    """Raises ServerError."""
    parser = _parser("drain", "Let a server, or one worker, finish its work and leave.", _DRAIN_EXAMPLES)
    parser.add_argument("--worker", default="", metavar="NAME", help="only this one (default: the whole server)")
    parser.add_argument("--wait", action="store_true", help="until it has left, showing what is left to do")
    args = parser.parse_args(argv)
    who = f"worker {args.worker}" if args.worker else "the server"
    with _connect(args) as link:
        n_left = link.drain(args.worker)
        print(f"{who} takes no more work; {n_left} requests left", flush=True)
        if not args.wait:
            return 0
        if args.worker:
            _wait_for_worker(link, args.worker, n_left)
        elif (unfinished := _wait_for_server(link, n_left)) > 0:
            print(f"error: the server has ended with {unfinished} requests left", file=sys.stderr)
            return 1
    print(f"{who} has left", flush=True)
    return 0


def _wait_for_worker(link: AdminLink, name: str, n_left: int) -> None:
    while True:
        worker = next((worker for worker in link.status().workers if worker.name == name), None)
        if worker is None:
            return
        if worker.n_in_flight != n_left:
            n_left = worker.n_in_flight
            print(f"{n_left} requests left", flush=True)
        time.sleep(_POLL_S)


def _wait_for_server(link: AdminLink, n_left: int) -> int:
    """How many requests were left when it was last heard: a drained server says 0 for a second before it ends."""
    while True:
        time.sleep(_POLL_S)
        try:
            now_left = link.drain("")
        except Gone:
            return n_left
        except NoAnswer as error:
            raise NoAnswer(
                f"{n_left} requests were left when it was last heard, and it has not left. {error}"
            ) from error
        if now_left != n_left:
            n_left = now_left
            print(f"{n_left} requests left", flush=True)
