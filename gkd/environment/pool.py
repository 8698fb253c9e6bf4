"""Worker processes of one host that run environments, for a caller with one thread that must never wait for them.

Every `step` and every `end` is answered by exactly one `Answer`, in the order in which they are done; what `abort`
drops is not answered. A fault of an environment is not an error here: the answer names it, and its trajectory is over.
"""

from __future__ import annotations

import base64
import contextlib
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from gkd.environment.worker import Answer, Call, Ready, Start
from gkd.errors import EnvironmentError
from gkd.user_code import Child, Progress

_POLL_S = 0.25  # a process that hangs, or shall start again, does not wake a `wait`
_CLOSE_S = 2.0  # limit of the `close` of objects that are still open

_READ_BYTES, _READS = 2**18, 16  # a process that writes without end does not keep the caller
_MAX_LINE = 2**23  # an answer has 1 MiB of text, which JSON may escape
_EXIT_S = 0.5  # limit from the end of its connection to that of a process
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


@dataclass(slots=True)
class _Trajectory:
    """Hold an open trajectory of the caller."""

    process: Process
    waits: bool = False  # a call has no answer yet
    lost: str = ""  # why its process has ended


class Environments:
    """Trajectories in worker processes. Not thread-safe. Each has a key of its own, which is never used again.

    Args:
        n: processes.
        timeout_s: limit of a `step`; code that blocks its process for `grace_s` longer ends all trajectories in it.
    """

    def __init__(self, start: Start, n: int, timeout_s: float, grace_s: float = 5.0) -> None:
        self.tools: tuple[dict[str, Any], ...] = ()  # tools of the class, for the chat template; `wait_ready` sets them
        self._path = start.path
        self._open: dict[int, _Trajectory] = {}  # key -> trajectory
        self._replies: list[Answer] = []
        self._closed = False
        start = msgspec.structs.replace(start, timeout_s=timeout_s)
        self._processes = [Process(start, timeout_s + grace_s) for _ in range(n)]

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until all processes have imported the class; a later start may take as long.

        Raises:
            EnvironmentError: the class cannot be imported in this time, or has not the form of `gkd.environment.form`.
        """
        deadline_s = time.monotonic() + timeout_s
        for process in self._processes:
            process.start_s = timeout_s
            try:
                tuple(process.answers())
                while process.ready is None:
                    self._poll(min(_POLL_S, deadline_s - time.monotonic()))
                    tuple(process.answers())
            except Died as problem:
                raise EnvironmentError(self._named(str(problem))) from None
            self.tools = tuple(process.ready.tools)

    @property
    def n_open(self) -> int:
        """Trajectories that are not over."""
        return len(self._open)

    def step(self, key: int, row: bytes, seed: int, text: str) -> None:
        """Give the next turn of a trajectory to its environment. The first call of a key makes the object.

        Args:
            row: see `gkd.data.row_files`; it and `seed` matter in the first call only.

        Raises:
            ValueError: the call before has no reply yet.
        """
        text = text.encode(errors="replace").decode()
        if key in self._open:
            self._call(key, text=text)
            return
        process = min(self._processes, key=lambda process: process.load)
        process.trajectories.add(key)
        self._open[key] = _Trajectory(process)
        self._call(key, text=text, row=base64.b64encode(row).decode(), seed=seed)

    def end(self, key: int) -> None:
        """End a trajectory that has no call without a reply: close its object. The reply has its reward."""
        if key in self._open:
            self._call(key, end=True)
        else:  # its first turn was the last one: there is no object
            self._replies.append(Answer(key))

    def abort(self, keys: Iterable[int]) -> None:
        """Close the objects of these trajectories without replies; keys that are not open are ignored."""
        dropped = set(keys)
        self._replies = [reply for reply in self._replies if reply.key not in dropped]
        for key in dropped & self._open.keys():
            if not self._open[key].lost:
                self._open[key].process.send(Call(key))
            self._remove(key)

    def replies(self) -> list[Answer]:
        """Return the replies that have arrived, in their order."""
        self._advance()
        found, self._replies = self._replies, []
        return found

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is a reply, at most this long. Returns whether there is one."""
        deadline_s = time.monotonic() + timeout_s
        self._advance()
        while not self._replies and (left_s := deadline_s - time.monotonic()) > 0:
            self._poll(min(left_s, _POLL_S))
            self._advance()
        return bool(self._replies)

    def close(self) -> None:
        """End all trajectories without replies, and all processes with what they have started. Idempotent."""
        if self._closed:
            return
        self._closed = True
        deadline_s = time.monotonic() + _CLOSE_S
        waiting = [process for process in self._processes if process.connection and process.ready]
        for process in waiting:
            process.stop()
        while waiting and time.monotonic() < deadline_s:
            self._poll(_POLL_S)
            waiting = [process for process in waiting if not self._has_stopped(process)]
        for process in self._processes:
            process.close()
        self._open.clear()
        self._replies.clear()

    @staticmethod
    def _has_stopped(process: Process) -> bool:
        try:
            tuple(process.answers())
        except Died:
            return True
        return False

    def _poll(self, timeout_s: float) -> None:
        """Wait for an event of a process."""
        poll = select.poll()
        for process in self._processes:
            if process.connection is not None:
                poll.register(process.connection, process.events)
        poll.poll(max(0.0, timeout_s) * 1000)

    def _call(self, key: int, **arguments: Any) -> None:
        trajectory = self._open[key]
        if trajectory.waits:
            raise ValueError(f"trajectory {key} has a call without a reply")
        trajectory.waits = True
        if trajectory.lost:  # its process ended while the student wrote
            self._reply(Answer(key, error=trajectory.lost))
        else:
            trajectory.process.send(Call(key, **arguments))

    def _advance(self) -> None:
        for process in self._processes:
            try:
                for answer in process.answers():
                    self._reply(answer)
            except Died as problem:
                process.die()
                for key in tuple(process.trajectories):
                    trajectory = self._open[key]
                    trajectory.lost = self._named(str(problem))
                    process.trajectories.discard(key)
                    if trajectory.waits:
                        self._reply(Answer(key, error=trajectory.lost))

    def _reply(self, answer: Answer) -> None:
        trajectory = self._open.get(answer.key)
        if trajectory is None or not trajectory.waits:  # it was aborted
            return
        trajectory.waits = False
        self._replies.append(answer)
        if answer.messages is None:
            self._remove(answer.key)

    def _remove(self, key: int) -> None:
        self._open.pop(key).process.trajectories.discard(key)

    def _named(self, problem: str) -> str:
        return problem if problem.startswith(self._path) else f"{self._path}: {problem}"
