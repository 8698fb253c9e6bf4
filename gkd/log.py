"""Log lines of every process of the project: time, role, message, to stderr."""

from __future__ import annotations

import logging
import sys


def get_logger(name: str) -> logging.Logger:
    """A logger that prints `12:34:56 [name] message`; calling it again changes nothing."""
    logger = logging.getLogger(f"gkd.{name}")
    root = logging.getLogger("gkd")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s [%(name)s] %(message)s", datefmt="%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        root.propagate = False
    return logger
