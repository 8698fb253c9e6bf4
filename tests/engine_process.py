"""Processes for vLLM's engines, of which each has one. On a CPU they are forks of a process that has imported vLLM.

Importing it takes 10 CPU seconds. That process has one thread and no engine, so a fork of it is as good as a new one.
"""

from __future__ import annotations

import atexit
import multiprocessing
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import psutil

from gkd.rollout.vllm.start import CPU_ENV
from tests.device import environment, on_cuda

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"}
# What the process that is forked has imported.
_PRELOAD = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "gkd.rollout.vllm.engine",
    "teacher_server.engines.vllm",
    "transformers.models.qwen3.modeling_qwen3",
)


class EngineProcess:
    """A process that calls functions one after the other; leaving the block ends it.

    Args:
        more: variables in addition to those of an engine on this device.
    """

    def __init__(self, more: Mapping[str, str] | None = None) -> None:
        values = {**({} if on_cuda() else CPU_ENV), **QUIET, **(more or {})}
        # A fork must not inherit CUDA, and there its start dominates.
        self._template = _Template(values, is_shared=False) if on_cuda() else _shared(tuple(values.items()))
        self._key = self._template.start()

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = 200.0, **kwargs: Any) -> Any:
        """Return what the module-level function returns there. Its error is raised here.

        Raises:
            EOFError: the process has ended.
            TimeoutError: it has not answered; it and all of its kind are killed.
        """
        return self._template.ask(timeout_s, self._key, function, args, kwargs)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._template.end(self._key)


class _Template:
    """The process that is forked, and its forks by number."""

    def __init__(self, values: Mapping[str, str], *, is_shared: bool = True) -> None:
        self._is_shared, self._n_started = is_shared, 0
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, _PRELOAD if is_shared else ()))
        with environment(dict(values)):
            self._process.start()
        theirs.close()
        atexit.register(self.close)  # before multiprocessing's own function, which waits for the process

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def start(self) -> int:
        self._n_started += 1
        return self._n_started

    def ask(self, timeout_s: float, *message: Any) -> Any:
        self._connection.send(message)
        if not self._connection.poll(timeout_s):
            self.close()
            raise TimeoutError(f"an engine's process did not answer within {timeout_s:g} s")
        value, error = self._connection.recv()
        if error is not None:
            raise error
        return value

    def end(self, key: int) -> None:
        if self.is_alive():
            self.ask(60.0, key, None, (), {})
        if not self._is_shared:
            self.close()

    def close(self) -> None:
        if self.is_alive():
            for process in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
                process.kill()
        self._process.join()


_templates: dict[tuple[tuple[str, str], ...], _Template] = {}  # by their variables


def _shared(values: tuple[tuple[str, str], ...]) -> _Template:
    """Return the template with these variables, a new one if the last was killed."""
    if values not in _templates or not _templates[values].is_alive():
        _templates[values] = _Template(dict(values))
    return _templates[values]


def _serve(connection: Connection, preload: tuple[str, ...]) -> None:
    """Runs in the template: forward messages to its forks, which it starts at their first one."""
    import importlib

    from tests.second_runner import allow_second_runner

    if not on_cuda():
        allow_second_runner()
    for name in preload:
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    forks: dict[int, tuple[Any, Connection]] = {}
    while True:
        try:
            key, function, args, kwargs = connection.recv()
        except EOFError:  # the tests' process has ended
            break
        if function is None:
            if key in forks:
                process, own = forks.pop(key)
                own.close()
                process.join()
            connection.send((None, None))
            continue
        if key not in forks:
            own, theirs = fork.Pipe()
            others = [connection, own, *(other for _, other in forks.values())]
            process = fork.Process(target=_work, args=(theirs, others))
            process.start()
            theirs.close()
            forks[key] = process, own
        own = forks[key][1]
        try:
            own.send((function, args, kwargs))
            reply = own.recv()
        except (EOFError, OSError):
            reply = None, EOFError("the engine's process has ended")
        connection.send(reply)
    for _, own in forks.values():
        own.close()


def _work(connection: Connection, others: list[Connection]) -> None:
    """Runs in a fork: call functions until the other end is closed."""
    for other in others:
        other.close()
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            reply = function(*args, **kwargs), None
        except BaseException as error:  # raised in the tests' process
            error.add_note(traceback.format_exc())
            reply = None, error
        connection.send(reply)
