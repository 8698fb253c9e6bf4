"""Which command was typed. Each is a file of its own and loaded only when asked for: a worker needs no broker."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from teacher_server.errors import ServerError


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name == "worker":
        from teacher_server.cli.worker import main
    elif name == "status":
        from teacher_server.cli.admin import status as main
    elif name == "drain":
        from teacher_server.cli.admin import drain as main
    elif name == "keygen":
        from teacher_server.cli.keygen import main
    else:
        from teacher_server.cli.serve import main
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """The command's exit code; 2 after a ServerError, which is one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and words[0] in ("serve", "worker", "status", "drain", "keygen") else "serve"
    if name in ("status", "drain", "keygen"):  # the server and its workers install handlers of their own
        # A shell that starts a command with `&` in a script has it ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _command(name)(words)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
