"""Wait for calls on many Ray actors, with a time limit and typed errors.

The first failure is raised at once; the other ranks of a collective may then hang until their own time-out. A time-out
names the ranks that have not replied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from gkd.errors import ClusterError, GkdError, RankFailed, RankTimeout
from gkd.spans import driver

Key = TypeVar("Key")


def gather(
    refs: Mapping[str, Any], what: str, timeout_s: float, failed: dict[str, RankFailed] | None = None
) -> dict[str, Any]:
    """Wait for all calls and return the results by name, in the order of `refs`.

    Args:
        refs: name of the rank or engine -> ObjectRef of its result.
        what: the stage, for messages: "train_step".
        failed: receives the error of each rank that failed, by name; the others are still waited for. With None
            the first failure is raised.

    Raises:
        GkdError: the typed error that a worker raised.
        RankFailed: a worker died or raised another error (with its traceback).
        RankTimeout: ranks have not replied in time; names them.
    """
    deadline = time.monotonic() + timeout_s
    names = {ref: name for name, ref in refs.items()}
    results: dict[str, Any] = {}
    pending = list(names)
    with driver.doing(what.replace("_", " "), len(pending)):
        while pending:
            done, _ = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise _timeout(what, timeout_s, (names[ref] for ref in pending))
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=0)  # one by one is quadratic
            for ref in done:
                try:
                    results[names[ref]] = fetch(ref, f"{what} on {names[ref]}")
                except RankFailed as error:
                    if failed is None:
                        raise
                    failed[names[ref]] = error
            driver.done(len(refs) - len(pending))
    return {name: results[name] for name in refs if name in results}


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """Pending calls on many actors. Call `wait` on each: it raises the error of a failed call.

    Args:
        refs, what, timeout_s: as in `gather`.
        finish: makes the result of `wait` from the results of the calls by name.
        on_failure: is called with the errors of ranks that failed, by name; the others are still waited for. With None
            the first one is raised.
    """

    refs: Mapping[str, Any]
    what: str
    timeout_s: float
    _: KW_ONLY
    finish: Callable[[dict[str, Any]], Any] = dict
    on_failure: Callable[[dict[str, RankFailed]], None] | None = None

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait as `gather` does, and return the result. May be repeated, also after a RankTimeout.

        Args:
            timeout_s: from now; None = the limit given to the constructor.
        """
        failed: dict[str, RankFailed] | None = None if self.on_failure is None else {}
        results = gather(self.refs, self.what, self.timeout_s if timeout_s is None else timeout_s, failed)
        if self.on_failure is not None and failed:
            self.on_failure(failed)
        return self.finish(results)


def wait_all(refs: Mapping[str, Any], what: str, timeout_s: float) -> None:
    """Wait until all calls have finished, without fetching their results.

    Errors of the calls are not raised here, but where the results are used.

    Raises:
        RankTimeout: calls have not finished in time; names them.
    """
    _, pending = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s, fetch_local=False)
    if pending:
        raise _timeout(what, timeout_s, (name for name, ref in refs.items() if ref in pending))


def _timeout(what: str, timeout_s: float, names: Iterable[str]) -> RankTimeout:
    late = sorted(names)
    return RankTimeout(f"{what}: no answer within {timeout_s:.0f} s from: {', '.join(late)}", late)


def drain(streams: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, list[Any]]:
    """Collect the refs of all items of streaming generators, by name, without fetching the items.

    The last item of a failed call is its error; see `fetch`.

    Raises:
        RankTimeout: generators have not ended in time; names them.
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
    """Return whether all calls have finished or failed."""
    return len(ray.wait(list(refs), num_returns=len(refs), timeout=0)[0]) == len(refs) if refs else True


def answers(refs: Collection[Any], timeout_s: float) -> list[Any]:
    """Return the results of the calls that succeed within `timeout_s`; failed ones are reported where they matter."""
    try:
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    except (RayError, RuntimeError, ConnectionError):  # Ray is shutting down
        return []
    results = []
    for ref in done:
        with suppress(RayError):  # the process died; the calls that the loop waits for raise it
            results.append(ray.get(ref))
    return results


def fetch(ref: Any, what: str) -> Any:
    """Return the result of a finished call; raise the worker's own error instead of Ray's wrapper."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, GkdError):
            raise cause from error
        lines = str(error).strip().splitlines()
        raise RankFailed(f"{what} failed:\n{error}", lines[-1] if lines else type(error).__name__) from error
    except RayActorError as error:
        raise RankFailed(f"{what}: the process died: {error}") from error
    except RayError as error:
        raise ClusterError(f"{what}: {type(error).__name__}: {error}") from error
