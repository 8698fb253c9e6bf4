"""Give Ray its token where it cannot keep one below HOME: containers with a user id of their own have HOME=/."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_TOKEN = "RAY_AUTH_TOKEN"


def set_token_without_home() -> None:
    """Set RAY_AUTH_TOKEN for this process and its children, unless Ray has a token or can write ~/.ray/auth_token."""
    if os.environ.get(_TOKEN) or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    try:
        folder = Path.home() / ".ray"  # RuntimeError: neither HOME nor an entry in /etc/passwd
        if os.access(folder / "auth_token", os.R_OK):
            return
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK) and not (folder / "auth_token").exists()
    except (OSError, RuntimeError):
        writable = False
    if not writable:
        os.environ[_TOKEN] = secrets.token_hex(32)
