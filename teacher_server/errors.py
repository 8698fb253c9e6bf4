"""Errors of the server's commands. Each is printed as one line that names the problem and the fix.

The server imports nothing from `gkd`, so it can be installed and started alone on a teacher host.
"""

from __future__ import annotations


class ServerError(Exception):
    """The server cannot start or cannot continue. `main` prints it as one line and exits with code 2."""


class SettingsError(ServerError):
    """A flag or a key of the YAML file is wrong. The text contains its name, its value and the fix."""
