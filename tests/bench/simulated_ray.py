"""Handles of objects of this process that are called as Ray actors are, so that the product's pools run on them.

Counted: calls by method, and the handles among their arguments, and results that are waited for.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from gkd.cluster import calls


class Apparatus:
    """CPU time of the objects that stand for other processes, over all threads."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        began_s = time.thread_time()
        try:
            yield
        finally:
            used_s = time.thread_time() - began_s
            with self._lock:
                self.cpu_s += used_s


class Ref:
    """Handle of a result; `get` may block."""

    __slots__ = ("get",)

    def __init__(self, get: Callable[[], Any]) -> None:
        self.get = get


class SimulatedRay:
    """Stands for the module `ray` in `gkd.cluster.calls`."""

    def __init__(self, apparatus: Apparatus) -> None:
        self.apparatus = apparatus
        self.n_calls: Counter[str] = Counter()
        self.n_handles: Counter[str] = Counter()  # arguments, by method
        self.n_fetched = self.n_waits = 0
        self._lock = threading.Lock()

    def install(self) -> None:
        calls.ray = self  # type: ignore[assignment]

    def handle(self, **methods: Callable[..., Any]) -> Any:
        """Return an actor handle.

        Args:
            methods: return a result; `stream` an iterator; with `num_returns=2` a pair.
        """
        return SimpleNamespace(**{name: _Method(self, name, method) for name, method in methods.items()})

    def wait(
        self, refs: Sequence[Ref], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
    ) -> tuple[list[Ref], list[Ref]]:
        del timeout, fetch_local
        self.n_waits += 1
        return list(refs[:num_returns]), list(refs[num_returns:])

    def get(self, ref: Ref) -> Any:
        with self._lock:
            self.n_fetched += 1
        return ref.get()

    def count(self, name: str, args: Sequence[Any]) -> None:
        with self.apparatus.not_counted(), self._lock:
            self.n_calls[name] += 1
            self.n_handles[name] += sum(isinstance(arg, Ref) for arg in args)


class _Method:
    def __init__(self, ray: SimulatedRay, name: str, method: Callable[..., Any]) -> None:
        self._ray, self._name, self._method, self._num_returns = ray, name, method, 1

    def options(self, *, num_returns: int | str = 1, **_: Any) -> _Method:
        method = _Method(self._ray, self._name, self._method)
        method._num_returns = num_returns  # type: ignore[assignment]
        return method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        self._ray.count(self._name, args)
        with self._ray.apparatus.not_counted():
            result = self._method(*args, **kwargs)
        if self._num_returns == 2:
            first, second = result
            return Ref(lambda: first), Ref(lambda: second)
        if self._num_returns == "streaming":
            return result
        return result if isinstance(result, Ref) else Ref(lambda: result)
