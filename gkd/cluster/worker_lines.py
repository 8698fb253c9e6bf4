"""The lines that ranks and engines print, forwarded by Ray to the driver: whole on the terminal, kept in the log."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ray._private.ray_logging import global_worker_stdstream_dispatcher

from gkd.log import log_to_file_only, terminal_lock

_NAME = "gkd_log_file"
_RAY_PRINTS = "ray_print_logs"  # Ray's handler that writes them to the terminal


def keep_worker_lines() -> None:
    """Copy every forwarded line from now on, including lines that Ray does not print because others are alike."""
    global_worker_stdstream_dispatcher.remove_handler(_NAME)  # left by an earlier cluster of this process
    global_worker_stdstream_dispatcher.add_handler(_NAME, _keep)
    _print_whole_lines()


def _print_whole_lines() -> None:
    """Let no line of the driver begin inside of a forwarded one: Ray writes a line and its newline apart."""

    def locked(prints: Callable[[dict[str, Any]], None], batch: dict[str, Any]) -> None:
        with terminal_lock():
            prints(batch)

    for name, prints in list(global_worker_stdstream_dispatcher.handlers):
        if name == _RAY_PRINTS:
            global_worker_stdstream_dispatcher.remove_handler(name)
            global_worker_stdstream_dispatcher.add_handler(name, partial(locked, prints))


def _keep(batch: dict[str, Any]) -> None:
    """Write one batch of Ray's log monitor: lines of one process. Runs in a thread of Ray."""
    if batch.get("pid") == "autoscaler":
        return  # a table of the cluster every 5 s
    who = batch.get("actor_name") or batch.get("task_name") or "process"
    name = f"{who} pid={batch.get('pid')} ip={batch.get('ip')}"
    for line in batch.get("lines") or ():
        log_to_file_only(str(line), name)
