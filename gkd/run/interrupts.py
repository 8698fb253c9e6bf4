"""Handle SIGINT, SIGHUP and what batch systems send so that the loop stops only between optimizer steps.

    before and after the loop   the first signal raises KeyboardInterrupt at once
    in the loop                 the first signal is held until the loop is in an `interruptible` block; then the last
                                finished step can be saved
    held, or during that save   Ctrl-C at least AGAIN_S later, or the end of LIMIT_S, raises KeyboardInterrupt at once.
                                Other signals have no effect: `timeout` and batch systems send several
    after KeyboardInterrupt     signals are ignored for STOP_S, so that nothing interrupts the end of the processes

Signal handlers belong to the process, so this state does, too. Without `install` (a loop of one's own) Python's
handlers stay, and nothing here has an effect.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from gkd.log import get_logger
from gkd.user_code import BATCH_SIGNALS

log = get_logger("run")

LIMIT_S = 120.0  # time from the first signal in the loop until the last save has to be finished
STOP_S = 30.0  # stopping all processes takes seconds
AGAIN_S = 2.0  # signals that come sooner than this after the first one are copies of it

_SIGNALS = (signal.SIGINT, signal.SIGHUP, *BATCH_SIGNALS)
_NAMES = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGALRM): "time limit"}


class _State:
    in_loop = False
    may_stop = False  # an `interruptible` block is running
    received_s: float | None = None  # clock at the first signal in the loop
    between_steps = False  # KeyboardInterrupt was raised in an `interruptible` block
    requested = False  # any signal has come
    answer = ("", "")  # the last signal, and what it leads to
    stopping_s: float | None = None  # clock when the processes began to stop
    terminals: tuple[int, ...] = ()  # file descriptors (1, 2) that were a terminal at `install`


_state = _State()


def install() -> None:
    """Receive the signals in this process from now on, but no SIGHUP that is ignored (nohup). For the main thread."""
    global _state
    _state = _State()
    _state.terminals = tuple(fd for fd in (1, 2) if os.isatty(fd))
    for number in (*_SIGNALS, signal.SIGALRM):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _receive)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_SIGNALS, signal.SIGALRM))  # its parent may have blocked them
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # Python takes its handlers away before it ends


@contextmanager
def training_loop() -> Iterator[None]:
    """Hold the first signal while the block runs, except in its `interruptible` blocks."""
    _state.in_loop = True
    try:
        yield
    finally:
        if _state.received_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        _state.in_loop = False
        _state.received_s = None


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal, also one that is held, raise KeyboardInterrupt in the block.

    In the block no rank may change the student, and what the block changes must not be part of a checkpoint.
    """
    _state.may_stop = _state.in_loop
    try:
        if _state.may_stop and _state.received_s is not None:
            _stop_between_steps()
        yield
    finally:
        _state.may_stop = False


def came_between_steps() -> bool:
    """Return whether the KeyboardInterrupt that ends the loop left the student of a finished step."""
    return _state.between_steps


def requested() -> bool:
    """Return whether a signal has come since `install`, also one that another error overtook."""
    return _state.requested


def answer() -> tuple[str, str]:
    """Return the name of the last signal and what it leads to; empty texts if none has come."""
    return _state.answer


def ignore_signals() -> None:
    """Ignore further signals for STOP_S: this process is stopping all that it has started."""
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    _state.stopping_s = time.monotonic()


def _receive(number: int, _: FrameType | None) -> None:
    if number == signal.SIGALRM and not _state.in_loop:
        return
    if number == signal.SIGHUP:
        _leave_terminal()
    now_s = time.monotonic()
    _state.requested = True
    if _state.stopping_s is not None and now_s - _state.stopping_s < STOP_S:
        return
    is_again = number == signal.SIGALRM or (number == signal.SIGINT and now_s - (_state.received_s or now_s) >= AGAIN_S)
    if _state.received_s is not None and not is_again:
        return
    if not _state.in_loop or _state.received_s is not None:
        _state.between_steps = False
        ignore_signals()
        _say(number, "stopping all processes" + " without saving" * _state.in_loop)
        raise KeyboardInterrupt
    _state.received_s = now_s
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    doing = "saving the last step" if _state.may_stop else "finishing the step, then saving"
    _say(number, f"{doing}; Ctrl-C again: stop without saving", f" (at the latest after {LIMIT_S:.0f} s)")
    if _state.may_stop:
        _stop_between_steps()


def _say(number: int, answer: str, limit: str = "") -> None:
    name = _NAMES.get(number) or signal.Signals(number).name
    _state.answer = (name, answer)
    # The handler may have interrupted the logger, or the panel that it prints through: another thread waits for them.
    threading.Thread(target=log.warning, args=("%s: %s%s", name, answer, limit), daemon=True).start()


def _leave_terminal() -> None:
    """Drop further output to a terminal that has ended: each write to it would raise an error, also during the save."""
    for fd in _state.terminals:
        if not os.isatty(fd):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)


def _stop_between_steps() -> None:
    _state.between_steps = True
    _state.may_stop = False
    raise KeyboardInterrupt
