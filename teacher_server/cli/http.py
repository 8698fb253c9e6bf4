"""`gkd teacher http`: answer HTTP clients of vLLM and SGLang with the teachers of a running server."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Sequence

from teacher_server.cli.ready_file import ReadyFile
from teacher_server.client.admin import AdminLink
from teacher_server.config.command import command_parser
from teacher_server.config.schema import HTTP_OPTIONS, HttpSettings
from teacher_server.config.settings import add_flags, flag_of, given_flags, ipv4, server_endpoint, settings_from
from teacher_server.errors import ServerError, SettingsError
from teacher_server.http.app import run
from teacher_server.http.link import BrokerLink
from teacher_server.log import log_to_stderr
from teacher_server.wire.keys import load_peer_keys

log = logging.getLogger(__name__)

_CONNECT_S = 5.0  # limit of the wait for the teacher server at the start
_EXAMPLES = """examples:
  TRL, prime-rl or slime on this machine use the teacher server on port 15555:
    gkd teacher http
    TRL: teacher_model_server_url http://127.0.0.1:8100    slime: --rm-url http://127.0.0.1:8100/generate

  reachable from other hosts, with a token:
    export TEACHER_TOKEN=$(openssl rand -hex 32)
    gkd teacher http --host 10.0.0.5 --bearer-env TEACHER_TOKEN

  in front of a server of another host that has keys:
    gkd teacher http --server 10.0.0.5:15555 --keys bundles/trainer

  the logprobs of a sequence's tokens:
    curl http://127.0.0.1:8100/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": [1, 2, 3], "max_tokens": 1, "prompt_logprobs": 4}'

paths: /v1/completions and /inference/v1/generate as vLLM, /generate as SGLang, /v1/models, /health.
signals: SIGTERM and Ctrl-C finish the requests of the next 3 s, and end it.
exit code: 0 after a signal, 2 after an error (one line on stderr)
"""


def main(argv: Sequence[str]) -> int:
    """Run the HTTP server and return the exit code: 0 after a signal. Raises ServerError."""
    parser = command_parser(
        "gkd teacher http",
        "Answer HTTP clients of vLLM and SGLang with the teachers of a running server.",
        _EXAMPLES,
        allow_abbrev=False,
    )
    add_flags(parser, HTTP_OPTIONS, "the HTTP server")
    settings = settings_from(HttpSettings, [given_flags(parser.parse_args(argv), HttpSettings)], flag_of)
    address = ipv4("--host", settings.host)
    token = _token(settings.bearer_env)
    if not ipaddress.ip_address(address).is_loopback and not token:
        raise SettingsError(
            f"--host {settings.host}: reachable from other machines, and without a token any client may use it. "
            "Fix: use 127.0.0.1, or --bearer-env NAME with the variable that holds a token."
        )
    endpoint = server_endpoint("--server", settings.server.removeprefix("tcp://"))
    keys = load_peer_keys(settings.keys, "client") if settings.keys else None
    with AdminLink(endpoint, keys, _CONNECT_S) as link:  # reports a wrong address or key before the start
        names = ",".join(teacher.name for teacher in link.status().teachers)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(address, settings.port))
        port = listener.getsockname()[1]
        ready_file = ReadyFile(settings.ready_file)
        ready_file.remove()
        stack.callback(ready_file.remove)
        log_to_stderr("http", settings.log_format)

        def announce() -> None:
            print(f"ready: http://{address}:{port} teachers={names}", flush=True)
            ready_file.write({"host": address, "port": port, "pid": os.getpid()})

        run(listener, BrokerLink(endpoint, keys), token, announce)
    return 0


def _token(name: str | None) -> str:
    if name is None:
        return ""
    token = os.environ.get(name, "").strip()
    if not token.isascii() or len(token) < 8:
        reason = "8 characters are the least" if token else "not set, or empty"
        raise SettingsError(f"--bearer-env {name}: the variable is no token ({reason}). Fix: export {name}=TOKEN.")
    return token


def _listener(address: str, port: int) -> socket.socket:
    """Return a bound socket. Raises ServerError."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        text = f"cannot listen on http://{address}:{port}: {error.strerror}"
        raise ServerError(f"{text}. Fix: stop the process that uses it, or change --port or --host.") from error
    return listener
