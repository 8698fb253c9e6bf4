"""The client's thread: send requests, keep a window of them in flight, resolve their futures.

    submit -> waiting -> window (in flight) -> future
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
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from teacher_server.client.connection import POLL_S, Connection, Message
from teacher_server.client.requests import Request
from teacher_server.errors import TeacherChanged, TeacherError, TeacherRefusal, TeacherUnavailable
from teacher_server.wire.protocol import (
    MAX_SEQUENCES,
    NO_REQUEST,
    Cancel,
    ErrorReply,
    GenerateReply,
    InfoReply,
    Pong,
    ProtocolError,
    Received,
    RowsReply,
    ScoreReply,
    requests,
)

_MAX_DAMAGED = 5  # damaged messages of one request before it fails
_RETRY_S = 0.02  # delay of a resend after a transient failure
_DOUBT_S = 0.5  # delay of a resend if a message may be lost: a reply in transit arrives before
_CLOSE_S = 5.0  # limit of the wait for the thread; a future's callback may delay it
OnScored = Callable[[ScoreReply | RowsReply, int], None]  # the reply, sequences that are complete with it


@dataclass(frozen=True, slots=True)
class Advice:
    """Hold what the errors of an outage advise, in the words of the client's user."""

    start: str  # a command that starts the server
    keys: str  # the setting that names the keys, e.g. ``teacher.keys``


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


class Client:
    """Own `connection` and the thread that uses it, from construction to `close`. Thread-safe.

    Other threads read single numbers of the connection.

    Futures raise TeacherUnavailable if the server sent no reply, or no scores, within the budgets of the connection's
    clock; the client remains usable. They raise another TeacherError if a request was refused, scores are invalid, or
    the client is closed.

    Args:
        n_in_flight: size of the window in sequences. A request that is larger is sent when the window is empty.
        max_waiting: number of requests waiting for the window from which on `submit` blocks.
        fingerprint: of the teacher's weights; empty takes the fingerprint of the first reply, None allows any.
        on_scored: called in the thread with each reply that holds scores, and how many sequences it completes.
        beats_when_idle: send heartbeats also without pending requests, and count the silence.
    """

    def __init__(
        self,
        connection: Connection,
        advice: Advice,
        *,
        n_in_flight: int,
        max_waiting: int,
        fingerprint: str | None,
        on_scored: OnScored | None = None,
        beats_when_idle: bool = False,
    ) -> None:
        self.stats = ClientStats()
        self.connection = connection
        self._clock = connection.clock
        self._max_waiting = max_waiting
        self._changed = threading.Condition()  # guards the three attributes below
        self._closed_because = ""  # the reason; empty while open
        self._waiting: deque[Request] = deque()  # requests that wait for the window
        self._was_woken = False  # the thread was woken, and has not found `_waiting` empty or the window full since
        self._cancelled: deque[Request] = deque()  # its operations are atomic
        # The attributes below are used only by the thread.
        self._advice = advice
        self._n_in_flight = n_in_flight
        self._fingerprint = fingerprint
        self._on_scored = on_scored
        self._beats_when_idle = beats_when_idle
        self._pending: dict[bytes, Request] = {}
        self._n_in_window = 0  # sequences of pending requests
        self._next_due_s = 0.0  # lower bound of all `due_s`
        self._thread = threading.Thread(target=self._run, name=f"teacher {connection.endpoint}", daemon=True)
        self._thread.start()

    # Any thread

    def submit(self, request: Request) -> Future[Any]:
        """Queue a request, and return its future; cancelling it cancels the request at the server.

        Blocks while `max_waiting` are waiting. Raises TeacherError: the client is closed.
        """
        with self._changed:
            if request.n_sequences and threading.current_thread() is not self._thread:  # not in a future's callback
                self._changed.wait_for(lambda: len(self._waiting) < self._max_waiting or self._closed_because)
            if self._closed_because:
                raise TeacherError(self._closed_because)
            if request.n_sequences:
                self._waiting.append(request)
            else:
                self._waiting.appendleft(request)
            was_woken = self._was_woken
            self._was_woken = True
        if not was_woken:  # a wake per request would interrupt the caller as often
            self.connection.wake()
        request.future.add_done_callback(functools.partial(self._on_done, request))
        return request.future

    def close(self) -> None:
        """Stop the thread, fail pending requests and close the socket, in bounded time. Idempotent."""
        self._refuse(f"teacher {self.connection.endpoint}: the client is closed")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_CLOSE_S)

    def _refuse(self, reason: str) -> None:
        """Refuse requests from now on; the first reason is kept."""
        with self._changed:
            self._closed_because = self._closed_because or reason
            self._changed.notify_all()
        self.connection.wake()

    def _on_done(self, request: Request, future: Future[Any]) -> None:
        if future.cancelled():
            self._cancelled.append(request)
            self.connection.wake()

    # Numbers that the thread writes; no two of them belong together.

    @property
    def n_in_flight(self) -> int:
        """Return the sequences that are not answered, including those that wait in the client."""
        with self._changed:
            return self._n_in_window + sum(request.n_sequences for request in self._waiting)

    @property
    def silent_s(self) -> float:
        """Return how long a client with pending requests, or `beats_when_idle`, has heard nothing."""
        return self._clock.silent_s if self._pending or self._beats_when_idle else 0.0

    # The thread

    def _run(self) -> None:
        reason: BaseException | None = None
        try:
            while not self._closed_because:
                self._iterate()
        except BaseException as error:  # any error must reach the pending futures
            reason = error
            raise
        finally:
            self._refuse(f"teacher {self.connection.endpoint}: the client's thread failed: {reason!r}")
            in_flight = list(self._pending)
            self._fail_all(f"{self._closed_because}; {len(in_flight) + len(self._waiting)} requests were pending")
            if reason is None:
                for request_id in in_flight:
                    self._send_notice(Cancel(request_id=request_id))
            self.connection.close()

    def _iterate(self) -> None:
        events = self.connection.listen(self._timeout_s())
        self.stats.n_server_restarts = self.connection.n_server_restarts
        if events.connected:
            self._next_due_s = 0.0
        if events.lost or events.doubtful:
            for request in list(self._pending.values()):
                if events.lost and request.is_stream and request.n_sent:
                    self._renew_id(request)  # messages in transit are lost, so the stream must restart
                self._schedule_resend(request, 0.0 if events.lost else _DOUBT_S)
        for message in events.messages:
            self._handle(message)
        while self._cancelled:
            self._drop_cancelled(self._cancelled.popleft())
        self._fill_window()
        if self._clock.now_s >= self._next_due_s:
            self._send_due()
        if self._pending and self._clock.problem():  # after all received messages were handled
            self._fail_all(self._outage(), TeacherUnavailable)

    def _timeout_s(self) -> float | None:
        """Return how long to listen; None = until woken."""
        if not self._pending:
            return POLL_S if self._beats_when_idle else None
        return min(max(self._next_due_s - self._clock.now_s, 0.0), POLL_S)

    def _fill_window(self) -> None:
        while (request := self._next_waiting()) is not None:
            if request.future.cancelled():
                continue
            if not self._pending and not self._beats_when_idle:
                self._clock.restart()
                self.connection.ping_now()
            self._pending[request.request_id] = request
            self._n_in_window += request.n_sequences
            self._next_due_s = 0.0

    def _next_waiting(self) -> Request | None:
        """Return the next request that waits, if the window has room for it."""
        n_free = self._n_in_flight - self._n_in_window if self._n_in_window else MAX_SEQUENCES
        with self._changed:
            if not self._waiting or self._waiting[0].n_sequences > n_free:
                self._was_woken = False
                return None
            self._changed.notify_all()
            return self._waiting.popleft()

    def _send_due(self) -> None:
        now_s = self._clock.now_s
        next_due_s = float("inf")
        for request in list(self._pending.values()):
            if request.due_s <= now_s:
                if request.n_sent and request.needs_new_id(now_s):
                    self._renew_id(request)
                if not self.connection.send(request.frames):
                    self._next_due_s = now_s + POLL_S
                    return
                self.stats.n_sent += request.n_sequences > 0
                self.stats.n_resent += request.n_sequences > 0 and request.n_sent > 0
                request.n_sent += 1
                request.due_s = now_s + request.resend_s
            next_due_s = min(next_due_s, request.due_s)
        self._next_due_s = next_due_s

    def _schedule_resend(self, request: Request, delay_s: float) -> None:
        """Resend after `delay_s` +- 50%. The jitter spreads requests that were rejected at the same time."""
        if request.n_sent:
            request.due_s = min(request.due_s, self._clock.now_s + delay_s * random.uniform(0.5, 1.5))
            self._next_due_s = min(self._next_due_s, request.due_s)

    def _renew_id(self, request: Request) -> None:
        del self._pending[request.request_id]
        self._send_notice(Cancel(request_id=request.request_id))
        request.renew_id()
        self._pending[request.request_id] = request

    def _send_notice(self, header: Cancel | Received) -> None:
        """Send a message without reply; dropped if there is no connection, because a new one restarts all streams."""
        self.connection.send([requests.encode(header)])

    # Replies

    def _handle(self, message: Message) -> None:
        reply, frames = message
        if isinstance(reply, ErrorReply):
            self._note_error(reply)
        request = None if isinstance(reply, Pong) else self._pending.get(reply.request_id)
        if request is None:
            self.stats.n_unwanted += 1
            return
        try:
            if isinstance(reply, ErrorReply):
                self._retry_or_raise(request, reply)
                return
            if isinstance(reply, ScoreReply | RowsReply | GenerateReply | InfoReply):
                self._check_model(reply)
            result = request.accept(reply, frames, self._clock.now_s)
            if request.receipt is not None:
                self._send_notice(request.receipt)
                request.receipt = None
            self._clock.progressed()
            if self._on_scored is not None and isinstance(reply, ScoreReply | RowsReply):
                self._on_scored(reply, request.n_sequences if result is not None else 0)
            if result is not None:
                self._finish(request, result)
        except ProtocolError as error:
            self._on_damaged(request, str(error))
        except Exception as error:  # TeacherError or MemoryError: fail this request, not the thread
            self._finish(request, error=error)

    def _note_error(self, error: ErrorReply) -> None:
        self.connection.trouble = f"{error.code}: {error.text}"
        if error.request_id == NO_REQUEST:  # the server could not read a request; it is unknown which one
            for request in self._pending.values():
                self._schedule_resend(request, _DOUBT_S)

    def _retry_or_raise(self, request: Request, error: ErrorReply) -> None:
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
            problem = f"teacher {self.connection.endpoint} refused the request: {error.code}: {error.text}"
            raise TeacherRefusal(f"{name}: {problem}", error.code, error.text)

    def _on_damaged(self, request: Request, problem: str) -> None:
        self.stats.n_damaged += 1
        request.n_damaged += 1
        if request.n_damaged > _MAX_DAMAGED:
            text = f"{request.name}: damaged {request.n_damaged} times in transit: {problem}"
            self._finish(request, error=TeacherError(text))
            return
        if request.is_stream:
            self._renew_id(request)
        self._schedule_resend(request, _RETRY_S)

    def _check_model(self, reply: ScoreReply | RowsReply | GenerateReply | InfoReply) -> None:
        if self._fingerprint is None:
            return
        served = reply.model_fingerprint
        if self._fingerprint and served != self._fingerprint:
            now = f"{reply.model_name} ({served})" if isinstance(reply, InfoReply) else served
            raise TeacherChanged(f"teacher {self.connection.endpoint} now serves {now}, expected {self._fingerprint}")
        self._fingerprint = served

    # Completion

    def _finish(self, request: Request, result: Any = None, *, error: BaseException | None = None) -> None:
        self._remove(request)
        if error is not None and request.is_stream:
            self._send_notice(Cancel(request_id=request.request_id))  # stop the rest of the stream
        _resolve(request, result, error)

    def _remove(self, request: Request) -> None:
        del self._pending[request.request_id]
        self._n_in_window -= request.n_sequences

    def _drop_cancelled(self, request: Request) -> None:
        if self._pending.get(request.request_id) is request:
            self._remove(request)
            if request.n_sent:
                self._send_notice(Cancel(request_id=request.request_id))
            self.stats.n_cancelled += 1
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
                self._changed.notify_all()
                self.stats.n_cancelled += 1

    def _outage(self) -> str:
        """Return the text of the error that ends all requests: what happened, and what to do."""
        connection = self.connection
        n_sequences = self.n_in_flight
        pending = f"{n_sequences} sequences" if n_sequences else "the teacher's description"
        text = f"{self._clock.problem()} (last message: {self._clock.last_heard}); pending: {pending}."
        fix = self._advice.start
        if refusal := connection.refusal(self._advice.keys):  # a server is there
            text += f" Handshake failed: {refusal}."
            fix = (
                f"set {self._advice.keys} to the bundle that its keygen made, or leave it empty if the server has no "
                "--keys"
            )
        if connection.trouble:
            text += f" Last error: {connection.trouble}."
        return f"teacher {connection.endpoint}: {text} Fix: {fix}"

    def _fail_all(self, message: str, kind: type[TeacherError] = TeacherError) -> None:
        with self._changed:
            failed = [*self._pending.values(), *self._waiting]
            self._waiting.clear()
            self._changed.notify_all()
        self._pending.clear()
        self._n_in_window = 0
        for request in failed:
            _resolve(request, None, kind(message))


def _resolve(request: Request, result: Any, error: BaseException | None) -> None:
    """Complete the future, which runs its callbacks; no-op if it was cancelled."""
    if not request.future.set_running_or_notify_cancel():
        return
    if error is None:
        request.future.set_result(result)
    else:
        request.future.set_exception(error)
