"""Errors of the server's commands and of its client.

The server imports nothing from `gkd`, so it can be installed and started alone on a teacher host. `gkd.errors` has the
errors of the trainer, which uses the client's errors under the same names.
"""

from __future__ import annotations


class ServerError(Exception):
    """The server cannot start or cannot continue. `main` prints it as one line and exits with code 2."""


class SettingsError(ServerError):
    """A flag or a key of the YAML file is wrong. The text contains its name, its value and the fix."""


class GkdError(Exception):
    """Base class of all deliberate errors of the trainer and of the client; `main_gkd` prints no traceback."""


class TeacherError(GkdError):
    """The teacher refused a request or returned invalid scores."""


class TeacherChanged(TeacherError):
    """The teacher server serves another model than at the start of the run."""


class TeacherRefusal(TeacherError):
    """The teacher server refused a request; a resend would be refused, too.

    Args:
        code: of the server's ErrorReply, e.g. ``bad_request``; empty if it is unknown.
        text: of the server's ErrorReply.
    """

    def __init__(self, message: str, code: str = "", text: str = "") -> None:
        self.code = code
        self.text = text
        super().__init__(message)

    def __reduce__(self) -> tuple[type[TeacherRefusal], tuple[str, str, str]]:
        # Exception's default pickling passes the message as the only argument.
        return type(self), (str(self), self.code, self.text)


class TeacherUnavailable(TeacherError):
    """The teacher did not respond within the outage budget; names its address and how to start it."""
