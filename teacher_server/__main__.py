"""`python -m teacher_server`: select the command by its name.

Each command is imported only when it runs: a worker does not load the broker.
"""

from __future__ import annotations

import difflib
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from teacher_server.errors import ServerError, SettingsError

_COMMANDS = ("serve", "worker", "status", "drain", "keygen", "http")


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name == "worker":
        from teacher_server.cli.worker import main
    elif name == "status":
        from teacher_server.cli.admin import status as main
    elif name == "drain":
        from teacher_server.cli.admin import drain as main
    elif name == "keygen":
        from teacher_server.cli.keygen import main
    elif name == "http":
        from teacher_server.cli.http import main
    elif name == "serve":
        from teacher_server.cli.serve import main
    else:
        close = difflib.get_close_matches(name, _COMMANDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise SettingsError(f"unknown command {name!r}. {hint}Fix: use one of {', '.join(_COMMANDS)}, or --help.")
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. A ServerError is printed as one line on stderr and returns 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        from teacher_server.wire.protocol import PROTOCOL_VERSION

        print(f"gkd {metadata.version('gkd')}, protocol {PROTOCOL_VERSION} of the teacher server")
        return 0
    name = words.pop(0) if words and not words[0].startswith("-") else "serve"
    if name in ("status", "drain", "keygen"):  # the server and its workers install their own handlers
        # A shell starts a command with `&` in a script with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _command(name)(words)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PermissionError as error:
        if not error.filename:  # not about a path of the settings
            raise
        print(f"error: {error}. Fix: permit this user to use it and the folders above it.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
