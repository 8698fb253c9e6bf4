"""Report at once when Ray's own processes end under a running job. Ray ends the driver only a minute later.

`ray stop` ends every Ray of the machine's user, including other programs' Ray.
"""

from __future__ import annotations

import threading
from typing import Any

import ray

from gkd.log import get_logger

log = get_logger("daemons")

_POLL_S = 1.0
_NEEDED = ("gcs_server", "raylet")  # no rank survives one of them


class DaemonWatch:
    """A thread that logs an error when a process of the Ray that ray.init has started here ends."""

    def __init__(self, poll_s: float = _POLL_S) -> None:
        self._node: Any = ray._private.worker._global_node
        self._poll_s = poll_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="daemons", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; call it before Ray is shut down."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_s):
            ended = [(kind, process.pid) for kind, process in self._node.dead_processes() if kind in _NEEDED]
            if ended:
                log.error(
                    "Ray's %s ended: killed by `ray stop`, which ends every Ray of this user, or for lack of memory. "
                    "This run ends within about a minute. Fix: start it again with trainer.resume=auto",
                    " and ".join(f"{kind} (pid {pid})" for kind, pid in ended),
                )
                return
