"""The host's side of one worker process: its start, its connection, and its end."""

from __future__ import annotations

import contextlib
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator

import msgspec

from gkd.environment.worker import Answer, Call, Ready, Start
from gkd.user_code import Child, Progress

_READ_BYTES, _READS = 2**18, 16  # a process that writes without end does not keep the caller
_MAX_LINE = 2**23  # an answer has 1 MiB of text, which JSON may escape
_EXIT_S = 0.5  # from the end of its connection to that of a process
_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before a start, by the deaths without an answer in between


class Died(Exception):
    """A process has ended, or must be; the text has the reason."""


class Process:
    """One process after the other in the same place.

    Args:
        hang_s: limit of the time in which its loop does not run.
    """

    def __init__(self, start: Start, hang_s: float) -> None:
        self._start, self._hang_s = start, hang_s
        self.start_s = 600.0  # limit of a start
        self.trajectories: set[int] = set()  # open in this process
        self.ready: Ready | None = None
        self.connection: socket.socket | None = None  # None: there is no process
        self._deaths, self._start_at_s = 0, 0.0
        self._folder = tempfile.mkdtemp(prefix="gkd_environment_")
        self.launch()

    def launch(self) -> None:
        """Start a process. Returns before it is ready."""
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        self._progress = Progress()
        self._progress.begin(0)
        fds = theirs.fileno(), self._progress.fd
        environment = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": self._folder}
        self._child = Child("gkd.environment.worker", (*fds, self._folder), fds, environment)
        theirs.close()
        self._in, self._out, self.ready = bytearray(), bytearray(), None
        self.send(self._start)

    def send(self, message: Start | Call) -> None:
        """Send a message as soon as the process reads it."""
        self._out += msgspec.json.encode(message) + b"\n"

    @property
    def events(self) -> int:
        """The events of the connection to wait for."""
        return select.POLLIN | (select.POLLOUT if self._out else 0)

    @property
    def load(self) -> tuple[bool, int]:
        """The smaller, the better for a new trajectory."""
        return self.connection is None, len(self.trajectories)

    def answers(self) -> Iterator[Answer]:
        """Write what waits, and yield what has arrived. Raises Died; start a process again after its backoff."""
        if self.connection is None:
            if time.monotonic() < self._start_at_s:
                return
            waiting = self._out
            try:
                self.launch()
            except OSError as error:
                raise Died(f"a process cannot be started ({error})") from error
            self._out += waiting
        ended = self._child.ended  # asked before the transfer, which then reads all that the process has sent
        ended |= self._transfer()
        *lines, self._in = self._in.split(b"\n")
        for line in lines:
            yield from self._decoded(line)
        age_s = self._progress.age_s
        if ended:
            raise Died(f"the worker process died ({self._child.end(_EXIT_S)})")
        if len(self._in) > _MAX_LINE:
            raise Died("the worker process sent a line without end")
        if self.ready is None and age_s > self.start_s:
            raise Died(f"was not imported within {self.start_s:g} s")
        if self.ready is not None and age_s > self._hang_s:
            fix = "Fix: use await or asyncio.to_thread for code that waits or computes"
            raise Died(f"code blocked the worker process for {age_s:.1f} s. {fix}")

    def die(self) -> None:
        """End the process; `answers` starts the next one."""
        self._release()
        self._out.clear()
        self._start_at_s = time.monotonic() + _BACKOFF_S[min(self._deaths, len(_BACKOFF_S) - 1)]
        self._deaths += 1

    def stop(self) -> None:
        """Ask the process to close its objects and to end."""
        self._out += b"\n"

    def close(self) -> None:
        """End the process, and remove its folder."""
        self._release()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _release(self) -> None:
        if self.connection is not None:
            self._child.end()
            self.connection.close()
            self._progress.close()
            self.connection = None

    def _transfer(self) -> bool:
        """Write and read without blocking. Returns whether the other end is closed."""
        assert self.connection is not None
        try:
            with contextlib.suppress(BlockingIOError):
                while self._out:
                    del self._out[: self.connection.send(self._out)]
            with contextlib.suppress(BlockingIOError):
                for _ in range(_READS):
                    if not (data := self.connection.recv(_READ_BYTES)):
                        return True
                    self._in += data
        except OSError:  # for example a broken pipe
            return True
        return False

    def _decoded(self, line: bytearray) -> Iterator[Answer]:
        try:
            if self.ready is not None:
                yield msgspec.json.decode(line, type=Answer)
                self._deaths = 0
                return
            ready = msgspec.json.decode(line, type=Ready)
        except msgspec.MsgspecError as error:  # the environment has written to the connection
            raise Died(f"the worker process sent an invalid answer ({error})") from error
        if ready.problem:
            raise Died(ready.problem)
        self.ready = ready
