"""The client's thread: send requests, keep a window of them in flight, resolve their futures.

    submit -> inbox -> window (in flight) -> future
                          ^        |
                          +-- resend: timeout, busy, draining, damaged, connection lost

A resend keeps its request id, so the server does not score the sequence twice; only the first valid reply is used.
(A stream that lost a message is restarted under a new id.)
"""

from __future__ import annotations

import functools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gkd.errors import TeacherChanged, TeacherError, TeacherRefusal, TeacherUnavailable
from gkd.scoring.teacher.link import POLL_S, Message, TeacherLink
from gkd.scoring.teacher.requests import PendingRequest
from gkd.types import TeacherHealth
from teacher_server.wire.protocol import (
    MAX_SEQUENCES,
    NO_REQUEST,
    Cancel,
    ErrorReply,
    InfoReply,
    ProtocolError,
    Received,
    RowsReply,
    ScoreReply,
    requests,
)

# Queue from the callers' threads to the client's thread: requests waiting for the window, and commands.

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


_MAX_DAMAGED = 5  # damaged messages of one request before it fails
_RETRY_S = 0.02  # delay of a resend after a transient failure
_DOUBT_S = 0.5  # delay of a resend if a message may be lost: a reply in transit arrives before
_CLOSE_S = 5.0  # limit of the wait for the thread; a future's callback may delay it
OnScored = Callable[[ScoreReply | RowsReply, int], None]  # the reply, sequences that are complete with it


@dataclass(slots=True)
class ClientStats:
    """Counters of a client, for metrics and tests."""

    n_sent: int = 0  # sent score requests, including resends
    n_resent: int = 0
    n_busy: int = 0  # replies busy or draining
    n_damaged: int = 0  # messages unreadable for either side, or with another token digest
    n_unwanted: int = 0  # late or duplicate replies
    n_cancelled: int = 0
    n_server_restarts: int = 0


class Exchange:
    """Own `link` and the thread that uses it, from construction to `close`.

    Args:
        n_in_flight: size of the window in sequences. A request that is larger is sent when the window is empty.
        max_waiting: number of requests waiting for the window from which on `submit` blocks.
        fingerprint: of the teacher's weights; empty takes the fingerprint of the first reply.
        on_scored: called in the thread with each reply that holds scores, and how many sequences it completes.
    """

    def __init__(
        self, link: TeacherLink, *, n_in_flight: int, max_waiting: int, fingerprint: str, on_scored: OnScored | None
    ) -> None:
        self.stats = ClientStats()
        self._inbox = Inbox(max_waiting, link.wake)
        # The attributes below are used only by the thread.
        self._link, self._clock = link, link.clock
        self._n_in_flight, self._fingerprint, self._on_scored = n_in_flight, fingerprint, on_scored
        self._pending: dict[bytes, AnyRequest] = {}
        self._n_in_window = 0  # sequences of pending requests
        self._next_due_s = 0.0  # lower bound of all `due_s`
        self._thread = threading.Thread(target=self._run, name=f"teacher {link.address}", daemon=True)
        self._inbox.reader = self._thread
        self._thread.start()

    # Any thread

    def submit(self, request: AnyRequest) -> None:
        """Queue a request; blocks while `max_waiting` are waiting. Raises TeacherError: the client is closed."""
        self._inbox.put(request)
        request.future.add_done_callback(functools.partial(self._on_done, request))

    def acknowledge(self, received: Received) -> None:
        """Tell the server that messages of a stream were consumed."""
        self._inbox.command(lambda: self._send_notice(received))

    def health(self) -> TeacherHealth:
        """Return what this client has heard; numbers of another thread, each for itself."""
        n_in_flight = self._n_in_window + self._inbox.n_sequences
        silent_s = self._clock.silent_s if self._pending else 0.0
        return TeacherHealth(
            silent_s, self._clock.outage_budget_s, n_in_flight, self._link.n_workers, self._link.n_queued
        )

    def close(self) -> None:
        """Stop the thread, fail pending requests and close the socket, in bounded time. Idempotent."""
        self._inbox.close(f"teacher {self._link.address}: the client is closed")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_CLOSE_S)

    def _on_done(self, request: AnyRequest, future: Future[Any]) -> None:
        if future.cancelled():
            self._inbox.command(lambda: self._drop_cancelled(request))

    # The thread

    def _run(self) -> None:
        reason: BaseException | None = None
        try:
            while not self._inbox.closed_because:
                self._iterate()
        except BaseException as error:  # any error must reach the pending futures
            reason = error
            raise
        finally:
            self._inbox.close(f"teacher {self._link.address}: the client's thread failed: {reason!r}")
            in_flight = list(self._pending)
            self._fail_all(f"{self._inbox.closed_because}; {len(in_flight) + len(self._inbox)} requests were pending")
            if reason is None:
                for request_id in in_flight:
                    self._send_notice(Cancel(request_id=request_id))
            self._link.close()

    def _iterate(self) -> None:
        events = self._link.listen(self._timeout_s())
        self.stats.n_server_restarts = self._link.n_server_restarts
        if events.connected:
            self._next_due_s = 0.0
        if events.lost or events.doubtful:
            for request in list(self._pending.values()):
                if events.lost and request.is_stream and request.n_sent:
                    self._renew_id(request)  # messages in transit are lost, so the stream must restart
                self._schedule_resend(request, 0.0 if events.lost else _DOUBT_S)
        for message in events.messages:
            self._handle(message)
        for command in self._inbox.commands():
            command()
        self._fill_window()
        if self._clock.now_s >= self._next_due_s:
            self._send_due()
        self._check_outage()  # after all received messages were handled

    def _timeout_s(self) -> float | None:
        """Return how long to listen; None = until woken."""
        if self._inbox.has_commands:
            return 0.0
        if not self._pending:
            return None
        return min(max(self._next_due_s - self._clock.now_s, 0.0), POLL_S)

    def _fill_window(self) -> None:
        while (request := self._inbox.next(self._n_free)) is not None:
            if request.future.cancelled():
                continue
            if not self._pending:
                self._link.begin()
            self._pending[request.request_id] = request
            self._n_in_window += request.n_sequences
            self._next_due_s = 0.0

    @property
    def _n_free(self) -> int:
        return self._n_in_flight - self._n_in_window if self._n_in_window else MAX_SEQUENCES

    def _send_due(self) -> None:
        now_s, next_due_s = self._clock.now_s, float("inf")
        for request in list(self._pending.values()):
            if request.due_s <= now_s:
                if request.n_sent and request.needs_new_id(now_s):
                    self._renew_id(request)
                if not self._link.send(request.frames):
                    self._next_due_s = now_s + POLL_S
                    return
                self.stats.n_sent += request.n_sequences > 0
                self.stats.n_resent += request.n_sequences > 0 and request.n_sent > 0
                request.n_sent += 1
                request.due_s = now_s + request.resend_s
            next_due_s = min(next_due_s, request.due_s)
        self._next_due_s = next_due_s

    def _schedule_resend(self, request: AnyRequest, delay_s: float) -> None:
        """Resend after `delay_s` +- 50%. The jitter spreads requests that were rejected at the same time."""
        if request.n_sent:
            request.due_s = min(request.due_s, self._clock.now_s + delay_s * random.uniform(0.5, 1.5))
            self._next_due_s = min(self._next_due_s, request.due_s)

    def _renew_id(self, request: AnyRequest) -> None:
        del self._pending[request.request_id]
        self._send_notice(Cancel(request_id=request.request_id))
        request.renew_id()
        self._pending[request.request_id] = request

    def _send_notice(self, header: Cancel | Received) -> None:
        """Send a message without reply; dropped if there is no connection, because a new one restarts all streams."""
        self._link.send([requests.encode(header)])

    # Replies

    def _handle(self, message: Message) -> None:
        header, frames = message
        request = None
        if isinstance(header, ErrorReply):
            self._note_error(header)
        if isinstance(header, ErrorReply | ScoreReply | RowsReply | InfoReply):
            request = self._pending.get(header.request_id)
        if request is None:
            self.stats.n_unwanted += 1
            return
        try:
            if isinstance(header, ErrorReply):
                self._retry_or_raise(request, header)
            elif isinstance(header, ScoreReply | RowsReply | InfoReply):
                self._check_model(header)
                result = request.accept(header, frames, self._clock.now_s)
                self._clock.progressed()
                if self._on_scored is not None and isinstance(header, ScoreReply | RowsReply):
                    self._on_scored(header, request.n_sequences if result is not None else 0)
                if result is not None:
                    self._finish(request, result)
        except ProtocolError as error:
            self._on_damaged(request, str(error))
        except Exception as error:  # TeacherError or MemoryError: fail this request, not the thread
            self._finish(request, error=error)

    def _note_error(self, error: ErrorReply) -> None:
        self._link.trouble = f"{error.code}: {error.text}"
        if error.request_id == NO_REQUEST:  # the server could not read a request; it is unknown which one
            for request in self._pending.values():
                self._schedule_resend(request, _DOUBT_S)

    def _retry_or_raise(self, request: AnyRequest, error: ErrorReply) -> None:
        if error.code in ("busy", "draining"):
            self.stats.n_busy += 1
            self._schedule_resend(request, max(error.retry_after_s, _RETRY_S))
        elif error.code == "deadline":
            self._schedule_resend(request, _RETRY_S)
        elif error.code == "units" and not request.with_units and any(r.with_units for r in self._pending.values()):
            self._schedule_resend(request, _DOUBT_S)  # a worker gets the map from another request
        elif error.code == "units" and request.add_units():
            self._schedule_resend(request, 0.0)
        elif error.code in ("damaged", "units"):
            self._on_damaged(request, error.text)
        else:
            of_one = error.code in ("bad_request", "engine") and error.sequence < len(request.names)
            name = request.names[error.sequence] if of_one else request.name
            raise TeacherRefusal(
                f"{name}: teacher {self._link.address} refused the request: {error.code}: {error.text}", error.code
            )

    def _on_damaged(self, request: AnyRequest, problem: str) -> None:
        self.stats.n_damaged += 1
        request.n_damaged += 1
        if request.n_damaged > _MAX_DAMAGED:
            text = f"{request.name}: damaged {request.n_damaged} times in transit: {problem}"
            self._finish(request, error=TeacherError(text))
            return
        if request.is_stream:
            self._renew_id(request)
        self._schedule_resend(request, _RETRY_S)

    def _check_model(self, header: ScoreReply | RowsReply | InfoReply) -> None:
        fingerprint = header.model_fingerprint
        if self._fingerprint and fingerprint != self._fingerprint:
            now = f"{header.model_name} ({fingerprint})" if isinstance(header, InfoReply) else fingerprint
            raise TeacherChanged(f"teacher {self._link.address} now serves {now}, expected {self._fingerprint}")
        self._fingerprint = fingerprint

    # Completion

    def _finish(self, request: AnyRequest, result: Any = None, *, error: BaseException | None = None) -> None:
        self._remove(request)
        if error is not None and request.is_stream:
            self._send_notice(Cancel(request_id=request.request_id))  # stop the rest of the stream
        _resolve(request, result, error)

    def _remove(self, request: AnyRequest) -> None:
        del self._pending[request.request_id]
        self._n_in_window -= request.n_sequences

    def _drop_cancelled(self, request: AnyRequest) -> None:
        if self._pending.get(request.request_id) is request:
            self._remove(request)
            if request.n_sent:
                self._send_notice(Cancel(request_id=request.request_id))
            self.stats.n_cancelled += 1
        elif self._inbox.remove(request):
            self.stats.n_cancelled += 1

    def _check_outage(self) -> None:
        if not self._pending or not self._clock.problem():
            return
        n_sequences = self._n_in_window + self._inbox.n_sequences
        error = self._link.unavailable(f"{n_sequences} sequences" if n_sequences else "the teacher's description")
        if error is not None:
            self._fail_all(str(error), TeacherUnavailable)

    def _fail_all(self, message: str, kind: type[TeacherError] = TeacherError) -> None:
        failed = [*self._pending.values(), *self._inbox.clear()]
        self._pending.clear()
        self._n_in_window = 0
        for request in failed:
            _resolve(request, None, kind(message))


def _resolve(request: AnyRequest, result: Any, error: BaseException | None) -> None:
    """Complete the future, which runs its callbacks; no-op if it was cancelled."""
    if not request.future.set_running_or_notify_cancel():
        return
    if error is None:
        request.future.set_result(result)
    else:
        request.future.set_exception(error)
