"""What other threads give the client's thread: requests that wait for a place in the window, and commands."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gkd.errors import TeacherError
from gkd.teacher.pending import Pending

AnyPending = Pending[Any]


class Inbox:
    """For any thread, except what is marked as the reader's.

    Args:
        max_waiting: requests that wait before `put` blocks.
        wake: tells the reader that there is something new.
    """

    def __init__(self, max_waiting: int, wake: Callable[[], None]) -> None:
        self.reader: threading.Thread | None = None
        self.ended = ""  # why nothing can be put in any more
        self._max_waiting, self._wake = max_waiting, wake
        self._changed = threading.Condition()
        self._waiting: deque[AnyPending] = deque()
        self._commands: deque[Callable[[], None]] = deque()  # append and popleft are atomic

    def put(self, batch: Sequence[AnyPending]) -> None:
        """Queue requests; blocks while too many wait, but never the reader (in a future's callback).

        Raises:
            TeacherError: it has ended.
        """
        with self._changed:
            if not self._is_reader() and any(pending.is_work for pending in batch):
                self._changed.wait_for(lambda: len(self._waiting) < self._max_waiting or self.ended)
            if self.ended:
                raise TeacherError(self.ended)
            for pending in batch:
                if pending.is_work:
                    self._waiting.append(pending)
                else:
                    self._waiting.appendleft(pending)  # needs no place in the window
        self._wake()

    def command(self, command: Callable[[], None]) -> None:
        """Have the reader call `command` soon; dropped if it has ended."""
        self._commands.append(command)
        if not self._is_reader():
            self._wake()

    def end(self, why: str) -> None:
        """Refuse everything from now on; the first reason stays."""
        with self._changed:
            self.ended = self.ended or why
            self._changed.notify_all()
        self._wake()

    def __len__(self) -> int:
        return len(self._waiting)

    def _is_reader(self) -> bool:
        return threading.current_thread() is self.reader

    # For the reader

    @property
    def has_commands(self) -> bool:
        return bool(self._commands)

    def commands(self) -> Iterator[Callable[[], None]]:
        while self._commands:
            yield self._commands.popleft()

    def next(self, *, room: bool) -> AnyPending | None:
        """The next request that may start; without `room` only one that takes none."""
        with self._changed:
            if not self._waiting or (self._waiting[0].is_work and not room):
                return None
            self._changed.notify_all()
            return self._waiting.popleft()

    def remove(self, pending: AnyPending) -> bool:
        """False if it does not wait here."""
        with self._changed:
            if pending not in self._waiting:
                return False
            self._waiting.remove(pending)
            self._changed.notify_all()
            return True

    def clear(self) -> list[AnyPending]:
        """Take out everything that waits."""
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
            return waiting
