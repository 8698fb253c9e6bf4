"""Logging for all processes of the project: time, name and message, to stderr, and on the driver to a file, too."""

from __future__ import annotations

import logging
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_WAITING_LINES = 1000  # kept for `log_to`: checks before a run has a folder log far less
_FILE_FORMAT = logging.Formatter("%(asctime)s [%(name)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")


class _FileCopy(logging.Handler):
    """Appends lines to the file of `log_to`; while there is none, it keeps the last ones, as text."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_FILE_FORMAT)
        self._file: TextIO | None = None
        self._waiting: deque[str] = deque(maxlen=_WAITING_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        if self._file is None:
            self._waiting.append(self.format(record))
        else:
            self._write(self.format(record))

    def open(self, path: Path, header: str) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)  # each line is on disk even if the process is killed
        self._file.write(f"{header}\n")
        while self._waiting and self._file is not None:
            self._write(self._waiting.popleft())

    def close_file(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            file.close()

    def _write(self, text: str) -> None:
        assert self._file is not None
        try:
            self._file.write(f"{text}\n")
        except OSError as error:  # the run goes on: its own files decide whether it can
            self._file = None
            get_logger("log").warning("no more lines are written to the log file: %s", str(error))


_copy = _FileCopy()


def get_logger(name: str) -> logging.Logger:
    """Return the logger `gkd.<name>`, which prints `12:34:56 [gkd.<name>] message`. Idempotent."""
    logger = logging.getLogger(f"gkd.{name}")
    root = logging.getLogger("gkd")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s [%(name)s] %(message)s", datefmt="%H:%M:%S"))
        root.addHandler(handler)
        root.addHandler(_copy)
        root.setLevel(logging.INFO)
        root.propagate = False
    return logger


@contextmanager
def log_to(path: Path, header: str) -> Iterator[None]:
    """Append a header to a file, what this process has logged so far and logs in the block, and the error that ends it.

    A disk that is full later does not end the run: it is logged once, on the terminal.

    Raises OSError: the file cannot be opened.
    """
    _copy.open(path, header)
    try:
        yield
    except BaseException:
        log_to_file_only(traceback.format_exc(), "error")
        raise
    finally:
        _copy.close_file()


def log_to_file_only(text: str, name: str) -> None:
    """Append lines to the file of `log_to`, not to the terminal.

    Args:
        text: one line or several.
        name: of the process that printed them; it stands where other lines have their logger's name.
    """
    for line in text.rstrip("\n").split("\n"):
        _copy.handle(logging.makeLogRecord({"name": name, "msg": line, "levelno": logging.INFO}))
