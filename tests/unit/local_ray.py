"""Actors of this process: their calls run at once, and the product's functions in `gkd.cluster.calls` wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gkd.config.schema import Config
from gkd.errors import GkdError
from gkd.rollout.engine.worker import RolloutWorker


class Ref:
    """A result, or the error of the call.

    Args:
        late: it is ready only where nothing else is waited for, as Ray reports the death of a process after the broken
            connections of the others.
        hangs: it is never ready.
    """

    def __init__(
        self, result: Any = None, error: GkdError | None = None, *, late: bool = False, hangs: bool = False
    ) -> None:
        self.result, self.error, self.late, self.hangs = result, error, late, hangs


class Method:
    """A method of an actor handle. The function may return a `Ref`, or an iterator, which stands for a stream."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *args: Any) -> Any:
        try:
            result = self._function(*args)
        except GkdError as error:
            return Ref(error=error)
        return result if isinstance(result, Ref | Iterator) else Ref(result)


class LocalRay:
    """Stands for the module `ray`; a time-out of a call that hangs is over at once."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []  # time-outs that are over

    def wait(
        self, refs: Sequence[Ref], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
    ) -> tuple[list[Ref], list[Ref]]:
        ready = [ref for ref in refs if not ref.hangs and (not ref.late or len(refs) == 1)][:num_returns]
        if not ready and timeout:
            self.waits_s.append(timeout)
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Any) -> Any:
        """Return the result of a call. An item of a stream stands for itself."""
        if not isinstance(ref, Ref):
            return ref
        if ref.error is not None:
            raise ref.error
        return ref.result

    def put(self, value: Any) -> Any:
        return value


class _Worker(RolloutWorker):
    def __init__(self, engine: Any, config: Config, run_dir: Path, tokenizer: Any) -> None:
        super().__init__(0)
        self._set_up(config, torch.device("cpu"), run_dir)
        self._engine = engine
        self._tokenizer = tokenizer


def worker_of(engine: Any, config: Config, run_dir: Path = Path("not_there"), tokenizer: Any = None) -> RolloutWorker:
    """Return a rollout worker on the CPU whose engine is this object."""
    return _Worker(engine, config, run_dir, tokenizer)
