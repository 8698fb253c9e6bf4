"""Run the server's commands as a user does, and send requests without the trainer's client."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from collections.abc import Iterator

import zmq

from teacher_server.__main__ import main
from teacher_server.wire.protocol import ScoreReply, as_frame, replies, requests
from tests.processes import wait_until
from tests.service.harness import ServerProcess, command
from tests.service.messages import make_request, make_tokens


def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in this process if it only asks or writes keys, and check its exit code."""
    if words[0] in ("status", "drain", "keygen"):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                found = main(words)
            except SystemExit as wrong_words:
                found = int(wrong_words.code or 0)
        done = subprocess.CompletedProcess([*words], found, out.getvalue(), err.getvalue())
    else:
        done = subprocess.run(command(*words), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def address(server: ServerProcess) -> tuple[str, str]:
    return "--server", f"127.0.0.1:{server.port}"


def workers(server: ServerProcess, *words: str) -> set[str]:
    """Return the names of the server's workers."""
    status = json.loads(run("status", *address(server), *words, "--json").stdout)
    return {worker["name"] for worker in status["workers"]}


def wait_for_requests(server: ServerProcess, n: int) -> None:
    """Wait until the server has `n` requests. A drain that came before would refuse those on their way."""

    def has_all() -> bool:
        status = json.loads(run("status", *address(server), "--json").stdout)
        return bool(status["n_queued"] + sum(worker["n_in_flight"] for worker in status["workers"]) == n)

    wait_until(has_all, 30.0, f"arrival of {n} requests")


@contextlib.contextmanager
def sent_requests(port: int, n: int, teacher: str = "") -> Iterator[zmq.Socket[bytes]]:
    """Open a client that has sent `n` requests."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, os.urandom(16))
    dealer.connect(f"tcp://127.0.0.1:{port}")
    for seed in range(n):
        tokens = make_tokens(seed=seed)
        dealer.send_multipart(
            [requests.encode(make_request(tokens, teacher=teacher, deadline_s=60.0)), as_frame(tokens)]
        )
    try:
        yield dealer
    finally:
        context.destroy(linger=0)


def n_scored(dealer: zmq.Socket[bytes], n: int) -> int:
    """Return how many of the next `n` replies are scores. Waits for each."""
    count = 0
    for _ in range(n):
        assert dealer.poll(20_000), "no reply"
        count += isinstance(replies.decode(dealer.recv_multipart()[0]), ScoreReply)
    return count
