"""A process that runs code of a user: `Host` is the end of its parent, `Parent` its own end of the connection.

The parent pickles its messages; the first one tells the process what to import, and is answered by `Ready`. The process
sends msgspec structs in MessagePack. Code of a user may write to the connection, so the parent decodes only the types
that it expects. Every message stands behind its length.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from gkd.errors import GkdError
from gkd.user_code import Child, encodable, end_with_parent

_POLL_S = 0.25  # a process that hangs, or shall start again, does not wake its parent
_EXIT_S = 0.5  # limit from the end of its connection to that of a process
_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before a start, by the deaths without a message in between
_LENGTH_BYTES = 8
_LONGEST = 2**26  # bytes of a message from a process
_READ_BYTES = 2**18
_READS = 16  # a process that writes without end does not keep its parent

Message = TypeVar("Message")
T = TypeVar("T")


class Died(Exception):
    """A process has ended; the text has the reason."""

    def of(self, *paths: str) -> str:
        """Return the reason with the paths of the user's code in front, unless it begins with one of them."""
        text = str(self)
        return text if text.startswith(paths) else f"{', '.join(paths)}: {text}"


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Report that the code is imported; later ones, that it does not block the process.

    Args:
        problem: why it cannot be used; empty: it can.
        tools: schemas of the tools that it offers, in the first one.
    """

    problem: str = ""
    tools: tuple[dict[str, Any], ...] = ()


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def _complete_messages(received: bytearray, longest: int = sys.maxsize) -> Iterator[bytearray]:
    """Take the complete messages from what was received. Raises ValueError: one is too long."""
    while len(received) >= _LENGTH_BYTES:
        size = int.from_bytes(received[:_LENGTH_BYTES], "big")
        if size > longest:
            raise ValueError(f"{size} bytes, more than {longest}")
        end = _LENGTH_BYTES + size
        if len(received) < end:
            return
        message = received[_LENGTH_BYTES:end]
        del received[:end]
        yield message


class Host(Generic[Message]):
    """Start a process and exchange messages with it. Only `wait_ready` blocks.

    Args:
        module: runs as `python -m`, and makes a `Parent`.
        start: first message.
        answers: type of the messages from the process.
        limit_s: longest time from `Ready` or `start_clock` to the next of them.
        late: what is wrong when it is longer.
        contained: the process sees no GPU, leaves no core dump, and works in a temporary folder.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self, module: str, start: Any, answers: type[Message], limit_s: float, late: str, *, contained: bool = False
    ) -> None:
        self.start_s = 600.0  # limit of the time until a process is ready
        self.ready: Ready | None = None
        self.connection: socket.socket | None = None  # None: there is no process
        self._module = module
        self._start = _framed(pickle.dumps(start))
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Ready | answers)
        self._limit_s = limit_s
        self._late = late
        self._folder = tempfile.mkdtemp(prefix="gkd_host_") if contained else ""
        self.unsent = bytearray()
        self._deaths = 0
        self._start_at_s = 0.0
        self._is_closed = False
        self._launch()

    def start_clock(self) -> None:
        """Let the limit count from now on."""
        self._clock_s = time.monotonic()

    def send(self, message: Any) -> None:
        """Let `messages` send a message, as soon as the process reads it; None is the last one."""
        self.unsent += _framed(pickle.dumps(message))

    def wait_ready(self, timeout_s: float) -> Ready:
        """Wait until the process has imported the code. Raises Died: it cannot, or not in this time from its start."""
        self.start_s = timeout_s
        while self.ready is None:
            wait_for_messages([self], timeout_s)
            for _ in self.messages():
                pass
        return self.ready

    def messages(self) -> Iterator[Message]:
        """Write what waits, and yield what has arrived. After Died the process starts again, after a while.

        Raises:
            Died: the process has ended, or was late or sent an invalid message and was ended.
        """
        try:
            yield from self._arrived()
        except Died:
            self._end()
            self.unsent.clear()
            self._start_at_s = time.monotonic() + _BACKOFF_S[min(self._deaths, len(_BACKOFF_S) - 1)]
            self._deaths += 1
            raise

    def close(self) -> None:
        """End the process and what it has started. Idempotent."""
        self._is_closed = True
        self._end()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _launch(self) -> socket.socket:
        connection, theirs = socket.socketpair()
        connection.setblocking(False)
        variables = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": self._folder} if self._folder else {}
        try:
            self._child = Child(self._module, (theirs.fileno(), self._folder), [theirs.fileno()], variables)
        except OSError:
            connection.close()
            raise
        finally:
            theirs.close()
        self.connection = connection
        self._received = bytearray()
        self.unsent[:0] = self._start
        self.start_clock()
        self._transfer(connection)
        return connection

    def _arrived(self) -> Iterator[Message]:
        now_s = time.monotonic()
        connection = self.connection
        if connection is None:
            if self._is_closed:
                raise Died("the worker process was ended")
            if now_s < self._start_at_s:
                return
            try:
                connection = self._launch()
            except OSError as error:
                raise Died(f"a process cannot be started ({error})") from error
        has_ended = self._child.ended  # asked before the transfer, which then reads all that the process has sent
        has_ended |= self._transfer(connection)
        try:
            for data in _complete_messages(self._received, _LONGEST):
                message = self._decoder.decode(data)
                if isinstance(message, Ready):
                    if message.problem:
                        raise Died(message.problem)
                    self.ready = self.ready or message
                    self.start_clock()
                else:
                    self._deaths = 0
                    yield message
        except (ValueError, msgspec.MsgspecError) as error:
            raise Died(f"the worker process sent an invalid message ({error})") from error
        if has_ended:
            raise Died(f"the worker process died ({self._child.end(_EXIT_S)})")
        if now_s - self._clock_s > (self._limit_s if self.ready else self.start_s):
            raise Died(self._late if self.ready else f"was not imported within {self.start_s:g} s")

    def _transfer(self, connection: socket.socket) -> bool:
        """Write and read without blocking. Returns whether the other end is closed."""
        try:
            with contextlib.suppress(BlockingIOError):
                while self.unsent:
                    del self.unsent[: connection.send(self.unsent)]
            with contextlib.suppress(BlockingIOError):
                for _ in range(_READS):
                    if not (data := connection.recv(_READ_BYTES)):
                        return True
                    self._received += data
        except OSError:  # for example a broken pipe
            return True
        return False

    def _end(self) -> None:
        if self.connection is not None:
            self._child.end()
            self.connection.close()
            self.connection = None
            self.ready = None


def wait_for_messages(hosts: Iterable[Host[Any]], timeout_s: float = _POLL_S) -> None:
    """Wait until `messages` of a host has something to do, at most this long, and never more than 0.25 s."""
    poll = select.poll()
    for host in hosts:
        if host.connection is not None:
            poll.register(host.connection, select.POLLIN | (select.POLLOUT if host.unsent else 0))
    poll.poll(max(0.0, min(timeout_s, _POLL_S)) * 1000)


class Parent:
    """The connection of this process, which a `Host` has started, to its parent. The process ends with the parent."""

    def __init__(self) -> None:
        fd = int(sys.argv[1])
        folder = sys.argv[2]
        end_with_parent(fd, folder)
        os.set_inheritable(fd, False)  # not for the processes that the code starts
        self._socket = socket.socket(fileno=fd)
        self._received = bytearray()
        if folder:
            _contain(folder)

    def receive(self) -> Any:
        """Wait for a message; blocks. Returns None if there are no more."""
        while True:
            for data in _complete_messages(self._received):
                return pickle.loads(data)
            if not (received := self._socket.recv(_READ_BYTES)):
                return None
            self._received += received

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; blocks until it is written, or the parent has ended."""
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(_framed(msgspec.msgpack.encode(message)))

    def load(self, search_path: Sequence[str], load: Callable[[], T]) -> T:
        """Return the user's code. If it cannot be used, report that to the parent, and end.

        Args:
            search_path: folders in which the driver finds modules.
            load: imports the code; raises GkdError.
        """
        sys.path[:0] = [folder for folder in search_path if folder not in sys.path]
        try:
            return load()
        except GkdError as error:
            self.send(Ready(encodable(str(error))))
            raise SystemExit(0) from error


def _contain(folder: str) -> None:
    for path in Path(folder).iterdir():  # files of the process before this one
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    os.chdir(folder)
    limit(resource.RLIMIT_CORE, 0)
    with contextlib.suppress(OSError):  # make this process the system's first to end; some containers forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")


def limit(kind: int, value: int) -> None:
    """Limit a resource of this process, as of `resource.setrlimit`."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
