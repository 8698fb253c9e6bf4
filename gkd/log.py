"""Logging for all processes of the project: time, name and message, to stderr."""

from __future__ import annotations

import logging
import sys


def get_logger(name: str) -> logging.Logger:
    """Return the logger `gkd.<name>`, which prints `12:34:56 [gkd.<name>] message`. Idempotent."""
    logger = logging.getLogger(f"gkd.{name}")
    root = logging.getLogger("gkd")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s [%(name)s] %(message)s", datefmt="%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        root.propagate = False
    return logger
