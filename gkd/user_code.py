"""Code of a user: the start and the end of the processes that run it, its errors, and the numbers that it returns."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import math
import os
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

_END_S = 5.0  # a process that is killed ends at once, unless it waits for a disk
EXEC_S = 0.5  # bound of the time in which a process that is being started has no environment
BATCH_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # batch systems send them before they kill a job
_MARK = "GKD_CHILD"  # environment variable; processes that the child starts have its value, too
_PACKAGE = f"{Path(__file__).parent}/"
_LIBRARIES = tuple(f"{path}/" for name, path in sysconfig.get_paths().items() if "lib" in name)
_SHOWN = 300  # characters of the names of columns
_LONGEST_TRACE = 4000  # characters


class Child:
    """A process of this interpreter in a session of its own: Ctrl-C does not reach it.

    Args:
        module: what it runs, as `python -m` does.
        arguments: of the module.
        fds: that it inherits.
        environment: variables that are added to this process's.
    """

    def __init__(
        self, module: str, arguments: Sequence[object], fds: Sequence[int], environment: Mapping[str, str] | None = None
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._how = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(environment or {}), _MARK: self._mark},
        )
        self.pid = self._process.pid

    @property
    def ended(self) -> bool:
        """True once the process has exited, by itself or by `end`."""
        # The process stays a zombie, so that its number, which is also its session's, means no other one.
        try:
            return bool(self._how) or bool(os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG))
        except ChildProcessError:  # a program that ignores the ends of its children has none
            return True

    def end(self, patience_s: float = 0.0) -> str:
        """End the process and what it has started. Returns how it ended, also if it did so before. Idempotent.

        Args:
            patience_s: it may end by itself meanwhile.
        """
        if not self._how:
            deadline_s = time.monotonic() + patience_s
            while not self.ended and time.monotonic() < deadline_s:
                time.sleep(0.005)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            _kill_started(self.pid, self._mark)
            try:
                code = self._process.wait(_END_S)
                self._how = f"signal {-code}" if code < 0 else f"exit code {code}"
            except subprocess.TimeoutExpired:
                self._how = "killed, but not gone yet"
        return self._how


def end_with_parent(fd: int, folder: str = "") -> None:
    """Let this process, a `Child`, ignore what stops a run, and end with all it has started when its parent has ended.

    Args:
        fd: a socket whose other end the parent holds.
        folder: removed before the end.
    """
    for number in (signal.SIGINT, signal.SIGHUP, *BATCH_SIGNALS):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that the code starts would inherit
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes block signals, and so would the programs
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))  # ends forks, also soon
    free = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM])
    hold = partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM])
    os.register_at_fork(before=hold, after_in_parent=free, after_in_child=free)
    watched = os.dup(fd)  # the program may close the other
    watch = threading.Thread(target=_wait_for_parents_end, args=(watched, os.getppid(), folder), daemon=True)
    watch.start()
    # The main thread, too, sees that the socket is closed. It must not end the process before the other has cleaned up.
    atexit.register(lambda: watch.join() if _is_hung_up(watched, 0) else None)


def _wait_for_parents_end(fd: int, parent: int, folder: str) -> None:
    # A process that the parent has forked holds the other end, too, so the parent's number is also compared.
    while not _is_hung_up(fd, 2000) and os.getppid() == parent:
        pass
    _kill_started(os.getpid(), os.environ.get(_MARK, ""), spare=os.getpid())
    if folder:  # a process of its own removes it: this one may still write to it until its end
        # The kill of dash has no `--`. Processes that are killed may write for a moment.
        script = 'kill -9 "-$0"; for i in 1 2 3 4 5; do rm -rf -- "$1" && break; sleep 0.2; done'
        command = ["sh", "-c", script, str(os.getpid()), folder]
        with contextlib.suppress(OSError):
            subprocess.Popen(command, start_new_session=True).wait()
    os.killpg(0, signal.SIGKILL)


def _is_hung_up(fd: int, timeout_ms: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)  # hang-ups alone
    return bool(poll.poll(timeout_ms))


def _kill_started(leader: int, mark: str, spare: int = 0) -> None:
    """Kill the processes of a session, and those that left it, which still have the mark in their environment."""
    killed = {spare}  # a killed process stays in the list until its parent asks for it
    deadline_s = time.monotonic() + EXEC_S
    while True:
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - killed
        is_started = {pid: _is_started_by(pid, leader, mark) for pid in pids}
        started = {pid for pid in pids if is_started[pid]}
        for pid in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= started
        if not started and (None not in is_started.values() or time.monotonic() > deadline_s):
            return


def _is_started_by(pid: int, leader: int, mark: str) -> bool | None:
    """Return whether to kill a process; None while it is being started, and Linux shows no environment yet."""
    try:
        if os.getsid(pid) == leader:
            return True
        if environment := Path(f"/proc/{pid}/environ").read_bytes():
            return f"{_MARK}={mark}".encode() in environment
        os.readlink(f"/proc/{pid}/exe")  # OSError: a thread of the kernel, or a process that has ended
        return None
    except OSError:  # it has ended, or is another user's
        return False


def blame(error: BaseException, row: Iterable[str] = ()) -> str:
    """Return where code of a user raised an error, and the columns of the row, to follow "raised ValueError: ...".

    Both are left out if they are unknown, as where the call itself fails.
    """
    frames = [frame for frame in _frames_of_user(error) if not frame.filename.startswith(_LIBRARIES)]
    if not frames:
        return ""
    last = frames[-1]
    columns = ", ".join(row)[:_SHOWN]
    return f", in {last.filename}:{last.lineno}: {last.line}" + (f". Columns of the row: {columns}" if columns else "")


def traceback_of_user(error: BaseException) -> str:
    """Return the traceback of an error from the code of a user on; empty if that has no part in it."""
    frames = traceback.format_list(_frames_of_user(error))
    text = "".join(["Traceback of your code:\n", *frames, *traceback.format_exception_only(error)])
    return encodable(text[:_LONGEST_TRACE]) if frames else ""


def _frames_of_user(error: BaseException) -> list[traceback.FrameSummary]:
    frames = list(traceback.extract_tb(error.__traceback__))
    not_users = (*_LIBRARIES, _PACKAGE, "<frozen")
    return list(dropwhile(lambda frame: frame.filename.startswith(not_users), frames))


def finite_number(value: object) -> float | str:
    """Return a number that code of a user returned, or what is wrong with it."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"{shown(value)}, not a number"
    return number if math.isfinite(number) else str(number)


def shown(value: object, limit: int = 200) -> str:
    """Return a value or the text of an error for a message: short, and without characters that UTF-8 does not have."""
    try:
        text = str(value) if isinstance(value, BaseException) else repr(value)
    except Exception as error:  # a user's class may raise any error here
        text = f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return encodable(text if len(text) <= limit else f"{text[:limit]}...")


def encodable(text: str) -> str:
    """Return a text without characters that UTF-8 does not have."""
    return text.encode(errors="backslashreplace").decode()


def search_path() -> tuple[str, ...]:
    """Return the folders in which this process finds modules, with its working folder."""
    return (os.getcwd(), *(folder for folder in sys.path if folder))


def import_function(path: str) -> Callable[..., Any]:
    """Return the function of a path. Raises ImportError: its module cannot be imported, or has no such function."""
    module, _, name = path.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise any error
        raise ImportError(f"{path}: cannot be imported ({type(error).__name__}: {error}{blame(error)})") from error
    if not callable(function):
        raise ImportError(f"{path}: is a {type(function).__name__}, not a function")
    return function
