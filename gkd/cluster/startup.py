"""Watch the start of all ranks from the driver: one deadline, log lines with their progress; the GPUs that each has."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any

import ray
from ray.exceptions import RayError

from gkd.cluster.gpu_table import RankPlacement
from gkd.cluster.gpus import machine_gpus, visible_gpus
from gkd.cluster.host import process_info
from gkd.errors import RankTimeout
from gkd.log import get_logger
from gkd.spans import Phase, Progress

log = get_logger("startup")

WATCH = "watch"  # concurrency group of the ranks' method `progress`; the pools are spawned with it
LOG_EVERY_S = 5.0
_REPEAT_EVERY = 6  # an unchanged line is logged again after this many intervals
_POLL_S = 2.0
_SLOWEST = 4  # ranks named in a line
_EARLY_S = 0.1  # Ray waits in whole milliseconds, so a wait may end before the deadline


class Startup:
    """Context manager with a thread that polls the progress of every rank and logs changes.

    Args:
        timeout_s: from now until all ranks are ready; `left_s` returns the remaining time.
    """

    def __init__(self, timeout_s: float, log_every_s: float = LOG_EVERY_S) -> None:
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._tell_s = log_every_s
        self._ranks: dict[str, Any] = {}
        self._silent: list[str] = []
        self._known: dict[str, Progress] = {}
        self._ready: set[str] = set()  # ranks that have been ready once: a later phase does not undo that
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._log_progress, name="startup", daemon=True)

    def left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def watch(self, ranks: Mapping[str, Any]) -> None:
        """Watch these processes too: name -> Ray handle with a method `progress`."""
        self._ranks = self._ranks | dict(ranks)  # a new dict: the thread reads the old one

    def expect(self, names: Sequence[str]) -> None:
        """Add names of expected processes that do not report progress."""
        self._silent = [*self._silent, *names]

    @property
    def names(self) -> list[str]:
        """Return the names of all expected processes."""
        return [*self._ranks, *self._silent]

    def poll(self, timeout_s: float = _POLL_S) -> dict[str, Progress]:
        """Return the progress of every rank. A rank without a reply in time keeps its last known progress."""
        refs = {handle.progress.remote(): name for name, handle in self._ranks.items()}
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
        for ref in done:
            try:
                self._known[refs[ref]] = ray.get(ref)
            except RayError:  # it died; the call that waits for its result raises the error
                self._known.pop(refs[ref], None)
        return dict(self._known)

    def __enter__(self) -> Startup:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._ended.set()
        self._thread.join(_POLL_S + 1.0)
        if isinstance(error, RankTimeout) and self.left_s() < _EARLY_S:
            # Without `late`: the call that timed out is only the first one waited for; any rank may be the cause.
            text = f"trainer.init_timeout_s = {self.timeout_s:g}: not all ranks were ready in time: {error}"
            raise RankTimeout(text) from error

    def _log_progress(self) -> None:
        logged: dict[str, Phase | str] = {}
        ticks = 0
        while not self._ended.wait(self._tell_s):
            ticks += 1
            try:
                progress = self.poll()
            except (RayError, RuntimeError, ConnectionError) as error:
                if not self._ended.is_set():
                    log.warning("start-up progress is not available: %s", str(error))
                return
            self._ready |= {name for name, reported in progress.items() if reported.phase is Phase.READY}
            phases = {name: reported.phase for name, reported in progress.items()}
            if not self._ended.is_set() and (phases != logged or ticks % _REPEAT_EVERY == 0):
                log.info("%s; %.0f s left", summary(list(self._ranks), progress, self._ready), self.left_s())
                logged = phases


def summary(names: Sequence[str], progress: Mapping[str, Progress], ready: Set[str]) -> str:
    """Format the number of ready ranks, and the slowest ranks of each other phase.

    Args:
        names: of all ranks. A rank that is missing in `progress` has no process that replies.
        ready: ranks that have been ready; they count also in a later phase, such as joining the weight-sync groups.
    """
    groups: dict[Phase | str, list[str]] = defaultdict(list)
    for name in names:
        groups[progress[name].phase if name in progress else "process starting"].append(name)
    groups.pop(Phase.READY, None)
    n_up = len(ready & set(names))
    group_lines = [_group(ranks, phase, progress) for phase, ranks in groups.items()]
    return f"start-up {n_up}/{len(names)} ready" + (f": {'; '.join(group_lines)}" if group_lines else "")


def _group(ranks: Sequence[str], phase: Phase | str, progress: Mapping[str, Progress]) -> str:
    """Format e.g. "rollout engine 0 importing vLLM (3 s)" or "9 loading weights (actor rank 8 8 s, ...)"."""
    if len(ranks) == 1:
        return f"{ranks[0]} {phase}" + (f" ({progress[ranks[0]].for_s:.0f} s)" if ranks[0] in progress else "")
    slowest = sorted(ranks, key=lambda name: -progress[name].for_s if name in progress else 0.0)[:_SLOWEST]
    named = [f"{name} {progress[name].for_s:.0f} s" if name in progress else name for name in slowest]
    more = ", ..." if len(ranks) > _SLOWEST else ""
    return f"{len(ranks)} {phase} ({', '.join(named)}{more})"


# The GPU placement of the calling process: its host, pid and visible GPUs.


def this_placement(pool: str, rank: int, *, ask_driver: bool = False) -> RankPlacement:
    """Return the placement of the calling process without creating a CUDA context.

    Args:
        ask_driver: query the driver for details of the GPUs. Takes about a second, and at most 20 s.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible_gpus(visible, machine_gpus() if ask_driver else ())
    process = process_info(os.getpid())
    context = ray.get_runtime_context() if ray.is_initialized() else None
    return RankPlacement(
        pool=pool,
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        cuda_visible_devices=visible,
        node=str(context.get_node_id()) if context is not None else "",
        started=process.started if process is not None else None,
        ray_gpu_ids=_ray_gpu_ids(),
        gpus=gpus,
    )


def sort_visible_gpus() -> None:
    """Sort CUDA_VISIBLE_DEVICES, so that cuda:0, cuda:1, ... of this process are its GPUs in ascending order.

    Ray 2.60 writes the variable from a set. The order differs from process to process if Ray itself was started with
    the variable. A value that names other GPUs than Ray assigned is not changed; the GPU map reports it.
    """
    ids = _ray_gpu_ids()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if ids and visible is not None and sorted(visible.split(",")) == sorted(ids):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)


def _ray_gpu_ids() -> tuple[str, ...]:
    """Return the ids that Ray assigned to this process, ascending; empty outside of Ray."""
    if not ray.is_initialized():
        return ()
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
    return tuple(sorted(ids, key=lambda gpu: (int(gpu) if gpu.isdecimal() else 0, gpu)))
