"""Find a Chromium that is installed on this machine. Playwright's own is not used: it is another large download."""

from __future__ import annotations

import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium_program() -> str | None:
    """Return the path of $GKD_CHROMIUM or of the first program found on PATH; None: there is none."""
    return os.environ.get("GKD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def sandbox_arguments() -> list[str]:
    """Return arguments with which it starts as root, as in containers, where its sandbox does not work."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []
