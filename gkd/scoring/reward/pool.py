"""Worker processes of one host that call the functions, each with a time limit.

A call that takes too long, or crashes the interpreter, can only be stopped by ending its process. So every function
runs in a process of its own. It replies once for a list of responses; where it is meanwhile is in shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Pipe
from queue import SimpleQueue
from typing import Any

import numpy as np

from gkd.data.row_files import decode_row
from gkd.errors import RewardError
from gkd.scoring.reward.worker import Request, Start
from gkd.user_code import Child, Progress

_END_S = 5.0  # limit from the end of its connection to that of a process


class Worker:
    """One process. Starts in the background; `wait_ready` waits for it."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._connection, theirs = Pipe()
        self._progress = Progress()
        fds = theirs.fileno(), self._progress.fd
        self._process = Child("gkd.scoring.reward.worker", fds, fds)
        theirs.close()
        self._connection.send(start)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the functions are imported. Raises RewardError: they cannot be, or not in time."""
        self._progress.begin(0)
        if problem := self._receive(timeout_s, lambda _: f"importing {', '.join(self._start.paths)}"):
            raise RewardError(str(problem))

    def values(self, requests: Sequence[Request], timeout_s: float) -> np.ndarray:
        """Call the functions for each request: [n, functions of a request] float64.

        Args:
            timeout_s: limit of each call.

        Raises:
            RewardError: see `RewardWorkers.values`. The process has ended.
        """
        name = partial(self._name, requests)
        try:
            self._progress.begin(0)
            self._connection.send(list(requests))
            numbers, problem = self._receive(timeout_s, name)
            if problem:
                text, _, trace = problem.partition("\n")
                error = RewardError(f"{name(len(numbers))}: {text}")
                if trace:
                    error.add_note(trace)  # the log of the run shows it, not the last line on the terminal
                raise error
        except BaseException:
            self.close()
            raise
        return np.array(numbers, np.float64).reshape(len(requests), -1)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.end()
        self._connection.close()
        self._progress.close()

    def _name(self, requests: Sequence[Request], call: int) -> str:
        """Return the function and the row of a call; each request has the same functions."""
        functions = requests[0].functions
        path = self._start.paths[functions[call % len(functions)]]
        return f"{path}, row {decode_row(requests[call // len(functions)].row)[0]}"

    def _receive(self, timeout_s: float, name: Callable[[int], str]) -> Any:
        """Wait for the next message.

        Args:
            timeout_s: limit of each call.
            name: describes a call.
        """
        left_s = timeout_s
        try:
            while not self._connection.poll(max(0.0, left_s)):
                if (left_s := timeout_s - self._progress.age_s) <= 0:
                    fix = "Fix: correct it, or raise reward.timeout_s"
                    raise RewardError(f"{name(self._progress.call)}: took longer than {timeout_s:g} s. {fix}")
            return self._connection.recv()
        except (EOFError, OSError):
            ended = self._process.end(_END_S)
            raise RewardError(f"{name(self._progress.call)}: the worker process died ({ended})") from None


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
