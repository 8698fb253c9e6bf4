"""Log lines of the server's processes: stderr, with time and process name."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(name: str) -> None:
    """Configure this process's root logger; stdout stays free for the ready line."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s.%(msecs)03d %(levelname)s [{name} %(process)d] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
