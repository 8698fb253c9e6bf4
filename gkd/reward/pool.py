"""Worker processes of one host that call the functions, each with a time limit.

A call that takes too long, or crashes the interpreter, can only be stopped by ending its process. So every function
runs in a process of its own, and its parent waits for each number.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Pipe
from queue import SimpleQueue

import numpy as np

from gkd.data.rows import decode_row
from gkd.errors import RewardError
from gkd.reward.worker import Request, Start

_END_S = 5.0  # a process that is killed ends at once


def import_path() -> tuple[str, ...]:
    """Return the folders in which this process finds modules, with its working folder."""
    return (os.getcwd(), *(folder for folder in sys.path if folder))


class Worker:
    """One process. Starts in the background; `wait_ready` waits for it."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "gkd.reward.worker", str(theirs.fileno())]
        # A session of its own: Ctrl-C does not reach it, and its end includes processes that a function has started.
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._connection.send(start)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the functions are imported. Raises RewardError: they cannot be, or not in time."""
        if (problem := self._receive(timeout_s, lambda: f"importing {', '.join(self._start.paths)}")) is not None:
            raise RewardError(str(problem))

    def values(self, requests: Sequence[Request], timeout_s: float) -> np.ndarray:
        """Call the functions for each request: [n, functions of a request] float64.

        Args:
            timeout_s: limit of each call.

        Raises:
            RewardError: see `RewardWorkers.values`. The process has ended.
        """
        numbers: list[list[float]] = []
        try:
            self._connection.send(list(requests))
            for request in requests:
                numbers.append([])
                for index in request.functions:
                    who = partial(self._name, index, request)
                    value = self._receive(timeout_s, who)
                    if not isinstance(value, float):
                        raise RewardError(f"{who()}: {value}")
                    numbers[-1].append(value)
        except BaseException:
            self.close()
            raise
        return np.array(numbers, np.float64)

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END_S)
        self._connection.close()

    def _name(self, index: int, request: Request) -> str:
        return f"{self._start.paths[index]}, row {decode_row(request.row)[0]}"

    def _receive(self, timeout_s: float, who: Callable[[], str]) -> object:
        try:
            if self._connection.poll(max(0.0, timeout_s)):
                reply: object = self._connection.recv()
                return reply
        except (EOFError, OSError):
            code = self._process.wait(_END_S)
            ended = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise RewardError(f"{who()}: the worker process died ({ended})") from None
        raise RewardError(f"{who()}: took longer than {timeout_s:g} s. Fix: correct it, or raise reward.timeout_s")


class RewardWorkers:
    """Several workers. Thread-safe: a call takes the worker that is idle first.

    Args:
        timeout_s: limit of each call of a function.
    """

    def __init__(self, start: Start, n: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._workers = [Worker(start) for _ in range(n)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._error: RewardError | None = None

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until all have imported the functions; call it once. Raises RewardError."""
        deadline_s = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.wait_ready(deadline_s - time.monotonic())
            self._idle.put(worker)

    def values(self, requests: Sequence[Request]) -> np.ndarray:
        """Call the functions for each request: [n, functions of a request] float64; blocks.

        Raises:
            RewardError: a function raised an error, took too long, returned no finite number, or its process died.
                Names function and row. All later calls raise it, too, because the run ends.
        """
        worker = self._idle.get()
        try:
            if self._error is not None:
                raise self._error
            return worker.values(requests, self._timeout_s)
        except RewardError as error:
            self._error = error
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.close()
