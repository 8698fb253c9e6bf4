"""Worker processes of one host that run environments, for a caller with one thread that must never wait for them.

Every `step` and every `end` is answered by exactly one `Reply`, in the order in which they are done; what `abort` drops
is not answered. A fault of an environment is not an error here: the reply names it, and its trajectory is over.
"""

from __future__ import annotations

import base64
import itertools
import select
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from gkd.environment.process import Died, Process
from gkd.environment.worker import Answer, Call, Start
from gkd.errors import EnvironmentError

_POLL_S = 0.25  # a process that hangs, or shall start again, does not wake a `wait`
_CLOSE_S = 2.0  # for the `close` of objects that are still open


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a step or the end of a trajectory; it is over without messages."""

    key: int
    messages: list[dict[str, str]] | None = None
    reward: float | None = None  # of a trajectory that is over, if its environment has one
    error: str = ""


@dataclass(slots=True)
class _Trajectory:
    """Hold an open trajectory of the caller."""

    key: int
    process: Process
    waits: bool = False  # for the answer to a call
    lost: str = ""  # why its process has ended


class Environments:
    """Trajectories in worker processes. Not thread-safe.

    Args:
        n: processes.
        timeout_s: limit of a `step`; code that blocks its process for `grace_s` longer ends all trajectories in it.
    """

    def __init__(self, start: Start, n: int, timeout_s: float, grace_s: float = 5.0) -> None:
        self.tools: tuple[dict[str, Any], ...] = ()  # of the class, for the chat template; `wait_ready` sets it
        self._path = start.path
        self._open: dict[int, int] = {}  # key -> number, which no later trajectory has
        self._trajectories: dict[int, _Trajectory] = {}  # by number
        self._numbers = itertools.count()
        self._replies: list[Reply] = []
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
            self._call(self._open[key], text=text)
            return
        number = self._open[key] = next(self._numbers)
        process = min(self._processes, key=lambda process: process.load)
        process.trajectories.add(number)
        self._trajectories[number] = _Trajectory(key, process)
        self._call(number, text=text, row=base64.b64encode(row).decode(), seed=seed)

    def end(self, key: int) -> None:
        """End a trajectory that has no call without a reply: close its object. The reply has its reward."""
        if key in self._open:
            self._call(self._open[key], end=True)
        else:  # its first turn was the last one: there is no object
            self._replies.append(Reply(key))

    def abort(self, keys: Iterable[int]) -> None:
        """Close the objects of these trajectories without replies; keys that are not open are ignored."""
        dropped = set(keys)
        self._replies = [reply for reply in self._replies if reply.key not in dropped]
        for key in dropped & self._open.keys():
            number = self._open[key]
            if not self._trajectories[number].lost:
                self._trajectories[number].process.send(Call(number))
            self._remove(number)

    def replies(self) -> list[Reply]:
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
        self._trajectories.clear()
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

    def _call(self, number: int, **arguments: Any) -> None:
        trajectory = self._trajectories[number]
        if trajectory.waits:
            raise ValueError(f"trajectory {trajectory.key} has a call without a reply")
        trajectory.waits = True
        if trajectory.lost:  # its process ended while the student wrote
            self._reply(Answer(number, error=trajectory.lost))
        else:
            trajectory.process.send(Call(number, **arguments))

    def _advance(self) -> None:
        for process in self._processes:
            try:
                for answer in process.answers():
                    self._reply(answer)
            except Died as problem:
                process.die()
                for number in tuple(process.trajectories):
                    trajectory = self._trajectories[number]
                    trajectory.lost = self._named(str(problem))
                    process.trajectories.discard(number)
                    if trajectory.waits:
                        self._reply(Answer(number, error=trajectory.lost))

    def _reply(self, answer: Answer) -> None:
        trajectory = self._trajectories.get(answer.trajectory)
        if trajectory is None or not trajectory.waits:  # it was aborted
            return
        trajectory.waits = False
        self._replies.append(Reply(trajectory.key, answer.messages, answer.reward, answer.error))
        if answer.messages is None:
            self._remove(answer.trajectory)

    def _remove(self, number: int) -> None:
        trajectory = self._trajectories.pop(number)
        del self._open[trajectory.key]
        trajectory.process.trajectories.discard(number)

    def _named(self, problem: str) -> str:
        return problem if problem.startswith(self._path) else f"{self._path}: {problem}"
