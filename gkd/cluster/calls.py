"""Wait for calls on many Ray actors without ever waiting in silence or for ever.

The first failure is raised at once (the other ranks of a collective may then hang until their own
time-out); whoever has not answered in time is named.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from gkd.errors import ClusterError, GkdError, RankTimeout

Key = TypeVar("Key")


def gather(refs: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
    """Results by name, in the order of `refs`.

    Args:
        refs: name of the rank or engine -> the ObjectRef of its answer.
        what: the stage, for messages: "train_step".

    Raises:
        GkdError: the typed error a worker raised, as it raised it.
        ClusterError: a worker died, or failed in an unforeseen way (with its traceback).
        RankTimeout: one has not answered in time; names all such.
    """
    deadline = time.monotonic() + timeout_s
    names = {ref: name for name, ref in refs.items()}
    results: dict[str, Any] = {}
    pending = list(names)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            late = sorted(names[ref] for ref in pending)
            raise RankTimeout(f"{what}: no answer within {timeout_s:.0f} s from: {', '.join(late)}", late)
        results[names[done[0]]] = fetch(done[0], f"{what} on {names[done[0]]}")
    return {name: results[name] for name in refs}


class Pending:
    """Calls that are under way on many actors. Whoever has one waits for it: what a call failed with comes out there.

    Args:
        refs, what, timeout_s: as of `gather`.
    """

    def __init__(self, refs: Mapping[str, Any], what: str, timeout_s: float) -> None:
        self._refs, self._what, self._timeout_s = dict(refs), what, timeout_s

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Results by name; returns and raises as `gather`. Harmless when repeated, also after a RankTimeout.

        Args:
            timeout_s: from now; None = what it was made with.
        """
        return gather(self._refs, self._what, self._timeout_s if timeout_s is None else timeout_s)


def wait_all(refs: Mapping[str, Any], what: str, timeout_s: float) -> None:
    """Waits for the ends of all calls; their results stay where they are. Raises as `gather`, but not their errors:
    whoever uses the results does.
    """
    _, pending = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s, fetch_local=False)
    late = sorted(name for name, ref in refs.items() if ref in pending)
    if late:
        raise RankTimeout(f"{what}: no answer within {timeout_s:.0f} s from: {', '.join(late)}", late)


def drain(streams: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, list[Any]]:
    """All items of some calls' streaming generators, by name; their content stays where it is.

    A call that fails has its error as its last item; see `fetch`.

    Raises:
        RankTimeout: one has not ended in time; names it.
    """
    deadline = time.monotonic() + timeout_s
    items: dict[str, list[Any]] = {name: [] for name in streams}
    pending = {stream: name for name, stream in streams.items()}
    while pending:
        left_s = max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=left_s, fetch_local=False)
        if not ready:
            late = sorted(pending.values())
            raise RankTimeout(f"{what}: no end within {timeout_s:.0f} s on: {', '.join(late)}", late)
        try:
            items[pending[ready[0]]].append(next(ready[0]))
        except StopIteration:
            del pending[ready[0]]
    return items


def all_done(refs: Collection[Any]) -> bool:
    """Have all of them finished, well or badly?"""
    return len(ray.wait(list(refs), num_returns=len(refs), timeout=0)[0]) == len(refs) if refs else True


def fetch(ref: Any, what: str) -> Any:
    """`ray.get` of something finished, with the worker's own error instead of Ray's wrapping."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, GkdError):
            raise cause from error
        raise ClusterError(f"{what} failed:\n{error}") from error
    except RayActorError as error:
        raise ClusterError(f"{what}: the process died: {error}") from error
    except RayError as error:
        raise ClusterError(f"{what}: {type(error).__name__}: {error}") from error
