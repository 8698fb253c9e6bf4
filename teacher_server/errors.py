"""Errors a person who runs the server can meet; each prints as one line and says what to do.

The server imports nothing of `gkd`, so that it installs and starts alone on a teacher host.
"""

from __future__ import annotations


class ServerError(Exception):
    """The server cannot start or go on; `main` prints it as one line and exits with code 2."""


class SettingsError(ServerError):
    """A flag or a key of the YAML file is wrong; the text names it, its value and the fix."""
