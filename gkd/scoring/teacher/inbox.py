"""Queue from the callers' threads to the client's thread: requests waiting for the window, and commands."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from gkd.errors import TeacherError
from gkd.scoring.teacher.requests import PendingRequest

AnyRequest = PendingRequest[Any]


class Inbox:
    """Thread-safe queue; the methods of the last section are for the reader only.

    Args:
        max_waiting: number of waiting requests from which on `put` blocks.
        wake: interrupts the reader's poll.
    """

    def __init__(self, max_waiting: int, wake: Callable[[], None]) -> None:
        self.reader: threading.Thread | None = None
        self.closed_because = ""  # the reason; empty while open
        self._max_waiting, self._wake = max_waiting, wake
        self.n_sequences = 0  # number of sequences in the waiting requests
        self._changed = threading.Condition()
        self._waiting: deque[AnyRequest] = deque()
        self._woken = False  # the reader was woken, and has not found the queue empty since
        self._commands: deque[Callable[[], None]] = deque()  # deque operations are atomic

    def put(self, request: AnyRequest) -> None:
        """Queue a request; blocks while the queue is full, except in the reader (in a future's callback).

        Raises:
            TeacherError: the inbox is closed.
        """
        with self._changed:
            if not self._is_reader() and request.n_sequences:
                self._changed.wait_for(lambda: len(self._waiting) < self._max_waiting or self.closed_because)
            if self.closed_because:
                raise TeacherError(self.closed_because)
            self.n_sequences += request.n_sequences
            if request.n_sequences:
                self._waiting.append(request)
            else:
                self._waiting.appendleft(request)
            woken, self._woken = self._woken, True
        if not woken:  # a wake per request would interrupt the caller as often
            self._wake()

    def command(self, command: Callable[[], None]) -> None:
        """Have the reader call `command` soon; dropped if the inbox is closed."""
        self._commands.append(command)
        if not self._is_reader():
            self._wake()

    def close(self, reason: str) -> None:
        """Refuse requests from now on; the first reason is kept."""
        with self._changed:
            self.closed_because = self.closed_because or reason
            self._changed.notify_all()
        self._wake()

    def __len__(self) -> int:
        return len(self._waiting)

    def _is_reader(self) -> bool:
        return threading.current_thread() is self.reader

    # Reader only

    @property
    def has_commands(self) -> bool:
        return bool(self._commands)

    def commands(self) -> Iterator[Callable[[], None]]:
        while self._commands:
            yield self._commands.popleft()

    def next(self, n_free: int) -> AnyRequest | None:
        """Return the next request to send, or None.

        Args:
            n_free: sequences that the window has room for.
        """
        with self._changed:
            if not self._waiting or self._waiting[0].n_sequences > n_free:
                self._woken = False
                return None
            self._changed.notify_all()
            request = self._waiting.popleft()
            self.n_sequences -= request.n_sequences
            return request

    def remove(self, request: AnyRequest) -> bool:
        """Remove a waiting request; return False if it is not in the queue."""
        with self._changed:
            if request not in self._waiting:
                return False
            self._waiting.remove(request)
            self.n_sequences -= request.n_sequences
            self._changed.notify_all()
            return True

    def clear(self) -> list[AnyRequest]:
        """Remove and return all waiting requests."""
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
            self.n_sequences = 0
            self._changed.notify_all()
            return waiting
