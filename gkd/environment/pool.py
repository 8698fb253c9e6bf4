"""Worker processes of one host that run environments, for a caller with one thread that must never wait for them.

Every `step` and every `end` is answered by exactly one `Answer`, in the order in which they are done; what `abort`
drops is not answered. A fault of an environment is not an error here: the answer names it, and its trajectory is over.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from gkd.environment.worker import Answer, Call, Start
from gkd.errors import EnvironmentError
from gkd.hosts import Died, Host, wait_for_messages

_CLOSE_S = 2.0  # limit of the `close` of objects that are still open


@dataclass(slots=True)
class _Trajectory:
    """Hold an open trajectory of the caller."""

    host: Host[Answer]
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
        hang_s = timeout_s + grace_s
        fix = "Fix: use await or asyncio.to_thread for code that waits or computes"
        late = f"code blocked the worker process for more than {hang_s:g} s. {fix}"
        hosts = [Host("gkd.environment.worker", start, Answer, hang_s, late, contained=True) for _ in range(n)]
        self._keys: dict[Host[Answer], set[int]] = {host: set() for host in hosts}  # open trajectories

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until all processes have imported the class; a later start may take as long.

        Raises:
            EnvironmentError: the class cannot be imported in this time, or has not the form of `gkd.environment.form`.
        """
        for host in self._keys:
            try:
                self.tools = host.wait_ready(timeout_s).tools
            except Died as problem:
                raise EnvironmentError(problem.of(self._path)) from None

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
        host = min(self._keys, key=lambda host: (host.connection is None, len(self._keys[host])))
        self._keys[host].add(key)
        self._open[key] = _Trajectory(host)
        self._call(key, text=text, row=row, seed=seed)

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
                self._open[key].host.send(Call(key))
            self._remove(key)

    def replies(self) -> list[Answer]:
        """Return the replies that have arrived, in their order."""
        self._advance()
        replies = self._replies
        self._replies = []
        return replies

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is a reply, at most this long. Returns whether there is one."""
        deadline_s = time.monotonic() + timeout_s
        self._advance()
        while not self._replies and (left_s := deadline_s - time.monotonic()) > 0:
            wait_for_messages(self._keys, left_s)
            self._advance()
        return bool(self._replies)

    def close(self) -> None:
        """End all trajectories without replies, and all processes with what they have started. Idempotent."""
        if self._closed:
            return
        self._closed = True
        deadline_s = time.monotonic() + _CLOSE_S
        running = [host for host in self._keys if host.ready]
        for host in running:
            host.send(None)
        while running and time.monotonic() < deadline_s:
            for host in running:
                with contextlib.suppress(Died):
                    tuple(host.messages())
            if running := [host for host in running if host.connection]:
                wait_for_messages(running)
        for host in self._keys:
            host.close()
        self._open.clear()
        self._replies.clear()

    def _call(self, key: int, **arguments: Any) -> None:
        trajectory = self._open[key]
        if trajectory.waits:
            raise ValueError(f"trajectory {key} has a call without a reply")
        trajectory.waits = True
        if trajectory.lost:  # its process ended while the student wrote
            self._reply(Answer(key, error=trajectory.lost))
        else:
            trajectory.host.send(Call(key, **arguments))

    def _advance(self) -> None:
        for host, keys in self._keys.items():
            try:
                for answer in host.messages():
                    self._reply(answer)
            except Died as problem:
                for key in tuple(keys):
                    trajectory = self._open[key]
                    trajectory.lost = problem.of(self._path)
                    keys.discard(key)
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
        self._keys[self._open.pop(key).host].discard(key)
