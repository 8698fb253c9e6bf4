"""Worker process of environments: `python -m gkd.environment.worker`, started by `gkd.hosts.Host`.

The parent sends one `Start`, then `Call`s; the worker answers each call but a drop with one `Answer`, in the order in
which they are done.

The class runs on one asyncio loop. Code that blocks the loop blocks all trajectories of the process, so blocking code
belongs in `asyncio.to_thread`. The worker shows twice a second that its loop and its threads work; the parent ends it
when that stops.

This is containment, not a sandbox: the process sees no GPU, its memory is limited, its working folder is temporary, and
what it starts ends with it. Code that the student writes can still read the files and use the network of this user; run
it in a container, or in a service that `step` calls. The number of processes is not limited: the system counts those of
the user, and with them Ray's.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from gkd.data.row_files import decode_row
from gkd.environment.form import Fault, checked_messages, checked_reward, import_environment
from gkd.environment.tools import ToolEnvironment
from gkd.hosts import Parent, Ready, limit
from gkd.log import get_logger
from gkd.user_code import blame, encodable, shown, traceback_of_user

_BEAT_S = 0.5
_N_THREADS = 256  # threads of asyncio.to_thread; those whose calls never end are lost until the process ends

log = get_logger("environment")


class Start(msgspec.Struct, frozen=True):
    """Hold what a worker needs.

    Args:
        search_path: folders in which the driver finds modules.
        memory_gib: limit of the address space of each process, those that tools start included; 0: none.
        timeout_s: limit of one `step`, and of one `close`; `Environments` sets it.
        written: calls of tools as the chat template writes them, see `gkd.environment.calls`.
    """

    path: str
    search_path: tuple[str, ...]
    memory_gib: float = 32.0
    timeout_s: float = 0.0
    written: tuple[str, ...] = ()


class Call(msgspec.Struct, frozen=True):
    """Ask for a step (`text`), for the end of a trajectory (`end`), or for its end without an answer."""

    key: int  # names the trajectory
    text: str | None = None
    end: bool = False
    row: bytes = b""  # with the first call; see `gkd.data.row_files`
    seed: int = 0


class Answer(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Answer a call; without messages the trajectory is over."""

    key: int
    messages: list[dict[str, str]] | None = None
    reward: float | None = None  # that of the environment, if the trajectory is over and it has one
    error: str = ""


class Server:
    """The trajectories of this process: objects of the class `kind`, whose answers `send` sends."""

    def __init__(self, kind: type[Any], start: Start, send: Callable[[Answer], object]) -> None:
        self._kind = kind
        self._start = start
        self._send = send
        self._open: dict[int, Any] = {}  # objects by trajectory
        self._rows: dict[int, tuple[str, tuple[str, ...]]] = {}  # file and line of their rows, and the columns
        self._shown: set[str] = set()  # places whose traceback is in the log
        self._steps: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, call: Call) -> None:
        """Begin a call."""
        if running := self._steps.pop(call.key, None):
            running.cancel()  # only a drop comes during a step
        task = asyncio.create_task(self._end(call) if call.text is None else self._step(call, call.text))
        if call.text is not None:
            self._steps[call.key] = task
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._forget(call.key, done))

    async def close(self) -> None:
        """Close the objects that are still open."""
        for key in tuple(self._open):
            self.receive(Call(key))
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _step(self, call: Call, text: str) -> None:
        key = call.key
        try:
            try:
                if call.row:
                    await self._limited("__init__", lambda: self._make(call))
                messages = checked_messages(await self._limited("step", lambda: self._open[key].step(text)))
            finally:
                self._steps.pop(key, None)  # a drop does not interrupt `close`
            self._send(Answer(key, messages, None if messages is not None else await self._closed(key)))
        except Fault as fault:
            self._send(Answer(key, error=self._text(key, fault)))
            await self._end(Call(key))

    async def _make(self, call: Call) -> None:
        where, row = decode_row(call.row)
        self._rows[call.key] = (where, tuple(row))
        self._open[call.key] = self._kind(row, call.seed)

    async def _end(self, call: Call) -> None:
        key = call.key
        try:
            answer = Answer(key, reward=await self._closed(key))
        except Fault as fault:
            answer = Answer(key, error=self._text(key, fault))
        if call.end:
            self._send(answer)
        elif answer.error:  # the host does not wait for an answer to a drop
            log.warning("%s", answer.error)

    async def _closed(self, key: int) -> float | None:
        """Close the object of a trajectory, and return its reward."""
        environment = self._open.pop(key, None)
        if hasattr(environment, "close"):
            await self._limited("close", environment.close)
        return await self._limited("reward", lambda: _reward(environment))

    async def _limited(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await code of the user. Raises Fault: it takes too long or raises an error."""
        task = asyncio.ensure_future(_caught(name, call))
        try:
            await asyncio.wait({task}, timeout=self._start.timeout_s)
            if task.done() and not task.cancelled():
                return task.result()
        finally:
            task.cancel()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # read: asyncio logs others
        if task.cancelled():
            raise Fault(f"{name} canceled itself")
        limit = f"{self._start.timeout_s:g} s"
        raise Fault(f"{name} took longer than {limit}. Fix: correct it, or raise rollout.environment_timeout_s")

    def _text(self, key: int, fault: Fault) -> str:
        where, columns = self._rows.get(key, ("?", ()))
        text = str(fault)
        if (error := fault.__cause__) is not None:
            text += blame(error, columns)
            if (place := blame(error)) and place not in self._shown:  # once: other trajectories repeat it
                self._shown.add(place)
                log.warning("%s", traceback_of_user(error))
        return encodable(f"{self._start.path}, row {where}: {text}")

    def _forget(self, key: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if key not in self._open:
            self._rows.pop(key, None)


async def _caught(name: str, call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except (asyncio.CancelledError, Fault):
        raise
    except BaseException as error:  # SystemExit is caught, too: it is the environment's own
        raise Fault(f"{name} raised {type(error).__name__}: {shown(error)}") from error


async def _reward(environment: Any) -> float | None:
    return checked_reward(environment)


async def serve(parent: Parent, kind: type[Any], start: Start) -> None:
    """Serve calls until the parent sends no more."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_N_THREADS))
    receiver = ThreadPoolExecutor(1)
    sender = ThreadPoolExecutor(1)
    server = Server(kind, start, lambda answer: sender.submit(parent.send, answer))
    beats = asyncio.create_task(_beat(lambda: sender.submit(parent.send, Ready())))
    while (call := await loop.run_in_executor(receiver, parent.receive)) is not None:
        server.receive(call)
    await server.close()
    beats.cancel()


async def _beat(send: Callable[[], object]) -> None:
    while True:
        await asyncio.to_thread(send)  # in a thread: this also shows that some are left
        await asyncio.sleep(_BEAT_S)


def _environment_class(start: Start) -> type[Any]:
    kind = import_environment(start.path)
    if issubclass(kind, ToolEnvironment):
        kind.learn_form(start.written)
    return kind


def main() -> None:
    """Serve environments; ends with the parent."""
    parent = Parent()
    start: Start = parent.receive()
    if start.memory_gib:
        limit(resource.RLIMIT_AS, int(start.memory_gib * 2**30))
    kind = parent.load(start.search_path, lambda: _environment_class(start))
    parent.send(Ready(tools=tuple(getattr(kind, "tools", ()))))
    asyncio.run(serve(parent, kind, start))


if __name__ == "__main__":
    main()
