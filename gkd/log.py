"""Logging for all processes of the project: time, name and message, to stderr, and on the driver to a file, too."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

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
        file, self._file = self._file, None
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
def terminal_lock() -> Iterator[None]:
    """Hold back this process's log lines in the block, in which a library prints to the same terminal."""
    get_logger("log")  # there is a handler from here on
    handler = next(h for h in logging.getLogger("gkd").handlers if isinstance(h, logging.StreamHandler))
    handler.acquire()
    try:
        yield
    finally:
        handler.release()


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


# Keep what the driver is doing now, as nested activities of its main thread: "step 12/120", "eval", "train".
#
# As with logging there is one instance per process, since code anywhere in the driver reports to it. Other threads of
# the driver work ahead, so their reports are ignored.


class Activity(NamedTuple):
    """One level.

    Args:
        since_s: start, on the clock of `Activities`.
        done: finished parts of `total`; total 0: unknown.
    """

    name: str
    since_s: float
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        if self.total > 1:
            return f"{self.name} {self.done}/{self.total}"
        return f"{self.name} {self.done}" if self.done and not self.total else self.name


class Activities:
    """The nested activities of the main thread; any thread may read them.

    Attributes:
        now: the current activities, outermost first; replaced as a whole, so readers need no lock.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.now: tuple[Activity, ...] = ()

    def during(self, name: str, total: int = 0) -> During:
        """Return a context manager that enters an activity for its block.

        Args:
            total: number of its parts, for `done`.
        """
        return During(self, name, total)

    def done(self, n: int) -> None:
        """Set the number of finished parts of the innermost activity."""
        if self.now and threading.get_ident() == _MAIN:
            name, since_s, _, total = self.now[-1]
            self.now = (*self.now[:-1], Activity(name, since_s, n, total))


class During:
    """One activity; a class, since steps of a second enter dozens of them."""

    __slots__ = ("_activities", "_name", "_outer", "_total")

    def __init__(self, activities: Activities, name: str, total: int) -> None:
        self._activities, self._name, self._total = activities, name, total
        self._outer: tuple[Activity, ...] | None = None  # None: another thread's, which is ignored

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN:
            activities = self._activities
            self._outer = activities.now
            activities.now = (*self._outer, Activity(self._name, activities.clock(), 0, self._total))

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            self._activities.now = self._outer


_MAIN = threading.main_thread().ident
activities = Activities()
