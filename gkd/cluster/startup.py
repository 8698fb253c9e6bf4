"""The start of all ranks, seen by the driver: one deadline for all of it, and a line now and then that says who is how
far.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError

from gkd.cluster.progress import UP, Progress
from gkd.errors import RankTimeout
from gkd.log import get_logger

log = get_logger("startup")

LOG_EVERY_S = 5.0
_AGAIN = 6  # times that long, and a line that has not changed is said again
_ASK_S = 2.0
_SLOWEST = 4  # ranks named in a line
_EARLY_S = 0.1  # Ray's waits are of whole milliseconds, so that they may end before the deadline


class Startup(AbstractContextManager["Startup"]):
    """Inside of it, a thread asks every rank how far it is, and logs it when that has changed, else now and then.

    Args:
        timeout_s: from now until all are up; `left_s` says what is left of it.
    """

    def __init__(self, timeout_s: float, log_every_s: float = LOG_EVERY_S) -> None:
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._tell_s = log_every_s
        self._ranks: dict[str, Any] = {}
        self._silent: list[str] = []
        self._known: dict[str, Progress] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="startup", daemon=True)

    def left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def watch(self, ranks: Mapping[str, Any]) -> None:
        """From now on, these too: name -> the Ray handle of a process with a method `progress`."""
        self._ranks = self._ranks | dict(ranks)  # not in place: the thread reads it

    def expect(self, names: Sequence[str]) -> None:
        """There should be processes of these names, too, which tell nobody how far they are."""
        self._silent = [*self._silent, *names]

    @property
    def names(self) -> list[str]:
        """Of all processes that there should be."""
        return [*self._ranks, *self._silent]

    def ask(self, timeout_s: float = _ASK_S) -> dict[str, Progress]:
        """How far every rank is, as far as it answers in time: one that does not is where it was when it last did."""
        refs = {handle.progress.remote(): name for name, handle in self._ranks.items()}
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
        for ref in done:
            try:
                self._known[refs[ref]] = ray.get(ref)
            except RayError:  # it has died: whoever waits for its work raises that
                self._known.pop(refs[ref], None)
        return dict(self._known)

    def __enter__(self) -> Startup:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(_ASK_S + 1.0)
        if isinstance(error, RankTimeout) and self.left_s() < _EARLY_S:
            text = f"not all ranks were up within trainer.init_timeout_s = {self.timeout_s:g} s: {error}"
            raise RankTimeout(
                text
            ) from error  # of whomever it was waiting for first: any rank may be the one that hangs

    def _tell(self) -> None:
        told: dict[str, str] = {}
        ticks = 0
        while not self._ended.wait(self._tell_s):
            ticks += 1
            try:
                progress = self.ask()
            except (RayError, RuntimeError, ConnectionError) as error:
                if not self._ended.is_set():
                    log.warning("nobody knows how far the ranks are: %s", str(error))
                return
            phases = {name: at.phase for name, at in progress.items()}
            if not self._ended.is_set() and (phases != told or ticks % _AGAIN == 0):
                log.info("%s; %.0f s left", summary(list(self._ranks), progress), self.left_s())
                told = phases


def summary(names: Sequence[str], progress: Mapping[str, Progress]) -> str:
    """How many ranks are up, how many are in which other phase, and the slowest of each.

    Args:
        names: of all ranks; one that is missing in `progress` has no process that answers.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[progress[name].phase if name in progress else "process not up"].append(name)
    n_up = len(groups.pop(UP, []))
    parts = [f"{len(ranks)} {phase} ({_some(ranks, progress)})" for phase, ranks in groups.items()]
    return ", ".join([f"{n_up} of {len(names)} ranks are up", *parts])


def _some(ranks: Sequence[str], progress: Mapping[str, Progress]) -> str:
    slowest = sorted(ranks, key=lambda name: -progress[name].for_s if name in progress else 0.0)[:_SLOWEST]
    named = [f"{name} {progress[name].for_s:.0f} s" if name in progress else name for name in slowest]
    return ", ".join(named) + (", ..." if len(ranks) > _SLOWEST else "")
