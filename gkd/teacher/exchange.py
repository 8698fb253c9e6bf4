"""The client's thread: puts requests on the wire, keeps a window of them there, gives each answer to its future.

    submit -> inbox -> window (on the wire) -> future
                          ^        |
                          +-- again: no answer in time, busy, draining, damaged, lost with a connection

Whatever is asked again goes under the same request id, so the server does not do it twice; only the
first valid answer is used. (A stream of which something was lost begins anew under another id.)
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gkd.errors import TeacherError, TeacherUnavailable
from gkd.teacher.inbox import AnyPending, Inbox
from gkd.teacher.link import POLL_S, Arrival, TeacherLink
from teacher_server.wire.protocol import (
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

_MAX_DAMAGED = 5  # damaged exchanges of one request before it is an error instead of bad luck
_SOON_S = 0.02  # until something that failed by chance is tried again
_DOUBT_S = 0.5  # until what may have been lost is sent again: an answer on its way comes before that
_CLOSE_S = 5.0  # for the thread to end; a future's callback may hold it up


@dataclass(slots=True)
class ClientStats:
    """Counts since the client was made; for metrics and tests."""

    n_sent: int = 0  # requests for scores put on the wire, resends included
    n_resent: int = 0
    n_busy: int = 0  # the server's queue was full, or it was about to leave
    n_damaged: int = 0  # exchanges either side could not read, or about other tokens
    n_unwanted: int = 0  # late and duplicate replies
    n_cancelled: int = 0
    n_server_restarts: int = 0


class Exchange:
    """Owns `link` and the thread that uses it, from construction to `close`.

    Args:
        n_in_flight: window of unanswered requests.
        max_waiting: requests that wait for a place in the window before `submit` blocks.
        fingerprint: of the teacher's weights; empty: the first one that answers is the expected one.
    """

    def __init__(self, link: TeacherLink, *, n_in_flight: int, max_waiting: int, fingerprint: str) -> None:
        self.stats = ClientStats()
        self._inbox = Inbox(max_waiting, link.wake)
        # All the rest is the thread's own.
        self._link, self._clock = link, link.clock
        self._n_in_flight, self._fingerprint = n_in_flight, fingerprint
        self._pending: dict[bytes, AnyPending] = {}
        self._n_work = 0  # of them, in the window
        self._next_due_s = 0.0  # not later than the first `due_s` of all
        self._thread = threading.Thread(target=self._run, name=f"teacher {link.address}", daemon=True)
        self._inbox.reader = self._thread
        self._thread.start()

    # For any thread

    def submit(self, batch: Sequence[AnyPending]) -> None:
        """Queue requests; blocks while `max_waiting` are waiting. Raises TeacherError if the client is closed."""
        self._inbox.put(batch)
        for pending in batch:
            pending.future.add_done_callback(functools.partial(self._note_cancelled, pending))

    def acknowledge(self, received: Received) -> None:
        """Let a stream go on."""
        self._inbox.command(lambda: self._tell(received))

    def close(self) -> None:
        """End the thread and close the socket; what is not answered fails. Bounded, may be called twice."""
        self._inbox.end(f"teacher {self._link.address}: the client is closed")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_CLOSE_S)

    def _note_cancelled(self, pending: AnyPending, future: Future[Any]) -> None:
        if future.cancelled():
            self._inbox.command(lambda: self._drop_cancelled(pending))

    # The thread

    def _run(self) -> None:
        reason: BaseException | None = None
        try:
            while not self._inbox.ended:
                self._turn()
        except BaseException as error:  # whoever waits for a future must learn of it, whatever it was
            reason = error
            raise
        finally:
            self._inbox.end(f"teacher {self._link.address}: the client's thread ended: {reason!r}")
            under_way = list(self._pending)
            self._fail_all(f"{self._inbox.ended}, with {len(under_way) + len(self._inbox)} requests not answered")
            if reason is None:
                for request_id in under_way:
                    self._tell(Cancel(request_id=request_id))
            self._link.close()

    def _turn(self) -> None:
        news = self._link.listen(self._patience_s())
        self.stats.n_server_restarts = self._link.n_server_restarts
        if news.connected:
            self._next_due_s = 0.0
        if news.lost or news.doubtful:
            for pending in list(self._pending.values()):
                if news.lost and pending.is_stream and pending.n_sent:
                    self._rename(pending)  # what was on its way never arrives, so it must begin anew
                self._ask_again(pending, 0.0 if news.lost else _DOUBT_S)
        for message in news.messages:
            self._take(message)
        for command in self._inbox.commands():
            command()
        self._fill_window()
        if self._clock.now_s >= self._next_due_s:
            self._send_due()
        self._give_up_if_hopeless()  # only now that everything that came was looked at

    def _patience_s(self) -> float | None:
        """How long to listen: for ever if there is nothing to wait for."""
        if self._inbox.has_commands:
            return 0.0
        if not self._pending:
            return None
        return min(max(self._next_due_s - self._clock.now_s, 0.0), POLL_S)

    def _fill_window(self) -> None:
        while (pending := self._inbox.next(room=self._n_work < self._n_in_flight)) is not None:
            if pending.future.cancelled():
                continue
            if not self._pending:
                self._link.begin()
            self._pending[pending.request_id] = pending
            self._n_work += pending.is_work
            self._next_due_s = 0.0

    def _send_due(self) -> None:
        now_s, next_due_s = self._clock.now_s, float("inf")
        for pending in list(self._pending.values()):
            if pending.due_s <= now_s:
                if pending.n_sent and pending.is_lost(now_s):
                    self._rename(pending)
                if not self._link.send(pending.message):
                    self._next_due_s = now_s + POLL_S
                    return
                self.stats.n_sent += pending.is_work
                self.stats.n_resent += pending.is_work and pending.n_sent > 0
                pending.n_sent += 1
                pending.due_s = now_s + pending.resend_s
            next_due_s = min(next_due_s, pending.due_s)
        self._next_due_s = next_due_s

    def _ask_again(self, pending: AnyPending, delay_s: float) -> None:
        """Send it in `delay_s`, spread by half: those that were turned away together must not come back together."""
        if pending.n_sent:
            pending.due_s = min(pending.due_s, self._clock.now_s + delay_s * random.uniform(0.5, 1.5))
            self._next_due_s = min(self._next_due_s, pending.due_s)

    def _rename(self, pending: AnyPending) -> None:
        del self._pending[pending.request_id]
        self._tell(Cancel(request_id=pending.request_id))
        pending.rename()
        self._pending[pending.request_id] = pending

    def _tell(self, header: Cancel | Received) -> None:
        """Send what needs no answer. Without a connection it is dropped: the next one makes everything anew."""
        self._link.send([requests.encode(header)])

    # Answers

    def _take(self, message: Arrival) -> None:
        header, frames = message
        pending = None
        if isinstance(header, ErrorReply):
            self._note_error(header)
        if isinstance(header, ErrorReply | ScoreReply | RowsReply | InfoReply):
            pending = self._pending.get(header.request_id)
        if pending is None:
            self.stats.n_unwanted += 1
            return
        try:
            if isinstance(header, ErrorReply):
                self._retry_or_raise(pending, header)
            elif isinstance(header, ScoreReply | RowsReply | InfoReply):
                self._check_model(header.model_fingerprint)
                result = pending.take(header, frames, self._clock.now_s)
                self._clock.progressed()
                if result is not None:
                    self._finish(pending, result)
        except ProtocolError as error:
            self._damaged(pending, str(error))
        except Exception as error:  # TeacherError, or no memory for it: the future's, not this thread's
            self._finish(pending, error=error)

    def _note_error(self, error: ErrorReply) -> None:
        self._link.trouble = f"{error.code}: {error.text}"
        if error.request_id == NO_REQUEST:  # the server could not read one of ours, and nobody knows which
            for pending in self._pending.values():
                self._ask_again(pending, _DOUBT_S)

    def _retry_or_raise(self, pending: AnyPending, error: ErrorReply) -> None:
        if error.code in ("busy", "draining"):
            self.stats.n_busy += 1
            self._ask_again(pending, max(error.retry_after_s, _SOON_S))
        elif error.code == "deadline":
            self._ask_again(pending, _SOON_S)
        elif error.code == "damaged":
            self._damaged(pending, error.text)
        else:
            raise TeacherError(f"{pending.where}: teacher {self._link.address} refused it: {error.code}: {error.text}")

    def _damaged(self, pending: AnyPending, problem: str) -> None:
        self.stats.n_damaged += 1
        pending.n_damaged += 1
        if pending.n_damaged > _MAX_DAMAGED:
            text = f"{pending.where}: damaged {pending.n_damaged} times on the way: {problem}"
            self._finish(pending, error=TeacherError(text))
            return
        if pending.is_stream:
            self._rename(pending)
        self._ask_again(pending, _SOON_S)

    def _check_model(self, fingerprint: str) -> None:
        if self._fingerprint and fingerprint != self._fingerprint:
            was, now = self._fingerprint, fingerprint
            raise TeacherError(f"teacher {self._link.address} now serves {now}, before it was {was}")
        self._fingerprint = fingerprint

    # Ends

    def _finish(self, pending: AnyPending, result: Any = None, *, error: BaseException | None = None) -> None:
        self._forget(pending)
        if error is not None and pending.is_stream:
            self._tell(Cancel(request_id=pending.request_id))  # or the rest of it would still come
        _resolve(pending, result, error)

    def _forget(self, pending: AnyPending) -> None:
        del self._pending[pending.request_id]
        self._n_work -= pending.is_work

    def _drop_cancelled(self, pending: AnyPending) -> None:
        if self._pending.get(pending.request_id) is pending:
            self._forget(pending)
            if pending.n_sent:
                self._tell(Cancel(request_id=pending.request_id))
            self.stats.n_cancelled += 1
        elif self._inbox.remove(pending):
            self.stats.n_cancelled += 1

    def _give_up_if_hopeless(self) -> None:
        if not self._pending or not self._clock.problem():
            return
        if all(pending.paused for pending in self._pending.values()):
            self._clock.progressed()  # it is our own side that takes its time
        n_work = self._n_work + len(self._inbox)
        error = self._link.unavailable(f"{n_work} sequences are" if n_work else "its description is")
        if error is not None:
            self._fail_all(str(error), TeacherUnavailable)

    def _fail_all(self, why: str, kind: type[TeacherError] = TeacherError) -> None:
        failed = [*self._pending.values(), *self._inbox.clear()]
        self._pending.clear()
        self._n_work = 0
        for pending in failed:
            _resolve(pending, None, kind(why))


def _resolve(pending: AnyPending, result: Any, error: BaseException | None) -> None:
    """Runs the future's callbacks."""
    if not pending.future.set_running_or_notify_cancel():
        return  # cancelled a moment ago
    if error is None:
        pending.future.set_result(result)
    else:
        pending.future.set_exception(error)
