"""Copy the lines that ranks and engines print, and that Ray forwards to the driver, into the run's log file."""

from __future__ import annotations

from typing import Any

from ray._private.ray_logging import global_worker_stdstream_dispatcher

from gkd.log import log_to_file_only

_NAME = "gkd_log_file"


def keep_worker_lines() -> None:
    """Copy every forwarded line from now on, also those that Ray does not print because others are alike."""
    global_worker_stdstream_dispatcher.remove_handler(_NAME)  # of a cluster that this process had before
    global_worker_stdstream_dispatcher.add_handler(_NAME, _keep)


def _keep(batch: dict[str, Any]) -> None:
    """Write one batch of Ray's log monitor: lines of one process. Runs in a thread of Ray."""
    who = batch.get("actor_name") or batch.get("task_name") or "process"
    name = f"{who} pid={batch.get('pid')} ip={batch.get('ip')}"
    for line in batch.get("lines") or ():
        log_to_file_only(str(line), name)
