"""Run functions of a benchmark in child processes that reply through a pipe and end with their parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from teacher_server.cli.worker import die_with_parent

ANSWER_TIMEOUT_S = 180.0  # loading a model on a busy machine
Serve = Callable[..., None]  # (its end of the pipe, the arguments given to Child)


class Child:
    """Run `serve(pipe, *args)` in a new process until the context ends. Errors of the child are raised here.

    Only the main thread may create one: the kernel kills the child when the thread that created it ends.

    Args:
        goodbye_s: seconds that the child may take to end after the pipe is closed, before it is killed.
    """

    def __init__(self, serve: Serve, *args: Any, goodbye_s: float = 0.0) -> None:
        self._name, self._goodbye_s = serve.__name__, goodbye_s
        self._pipe, theirs = multiprocessing.Pipe()
        # Spawned: a fork would share this process's sockets and threads.
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_run, args=(theirs, os.getpid(), serve, args), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # the child reads the end of the pipe
        self._process.join(timeout=self._goodbye_s)
        self._process.kill()
        self._process.join(timeout=5.0)

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None  # it was started
        return pid

    def post(self, question: Any) -> None:
        self._pipe.send(question)

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Return the child's next reply. Raise RuntimeError if the child failed, has ended or timed out."""
        if not self._pipe.poll(timeout_s):
            raise RuntimeError(f"child {self._name}: no answer in {timeout_s:g} s")
        try:
            answer = self._pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"child {self._name} has ended with code {self._process.exitcode}") from error
        if isinstance(answer, BaseException):
            raise RuntimeError(f"child {self._name} failed") from answer
        return answer

    def ask(self, question: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """`post`, then `answer`."""
        self.post(question)
        return self.answer(timeout_s)


def _run(pipe: Connection, parent_pid: int, serve: Serve, args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its children
    die_with_parent(parent_pid)
    try:
        serve(pipe, *args)
    except EOFError:  # the parent has closed the pipe
        return
    except BaseException as error:
        with contextlib.suppress(BrokenPipeError):  # the parent has ended
            pipe.send(error)
        raise
