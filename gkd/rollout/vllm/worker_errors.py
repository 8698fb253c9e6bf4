"""Pass the WeightSyncErrors of vLLM's workers on to the engine.

With several workers vLLM replaces an exception by a RuntimeError, whether the worker raises or returns it. It leaves
the results of the other workers in their queues, as results of the next call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from gkd.errors import TransferCutOff, WeightSyncError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SyncFailure:
    """A worker's result instead of an exception."""

    error: WeightSyncError


def returns_sync_errors(method: Callable[..., T]) -> Callable[..., T | SyncFailure]:
    """Let a worker's method return a SyncFailure instead of raising a WeightSyncError."""

    @functools.wraps(method)
    def wrapped(*args: object, **kwargs: object) -> T | SyncFailure:
        try:
            return method(*args, **kwargs)
        except WeightSyncError as error:
            return SyncFailure(error)

    return wrapped


def raise_sync_error(results: Iterable[object]) -> None:
    """Raise the error of the workers' results that explains the others: rather one that is not a TransferCutOff."""
    errors = [result.error for result in results if isinstance(result, SyncFailure)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, TransferCutOff))
