"""Which rank sits on which GPU: what one process can say about itself."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank runs and which devices it was given."""

    pool: str
    rank: int
    host: str
    pid: int
    cuda_visible_devices: str | None  # None = unset

    def line(self) -> str:
        visible = self.cuda_visible_devices
        count = len([d for d in (visible or "").split(",") if d])
        return (
            f"{self.pool} worker {self.rank}: CUDA_VISIBLE_DEVICES={visible}, GPU count={count}, "
            f"host={self.host}, pid={self.pid}"
        )


def this_place(pool: str, rank: int) -> RankPlace:
    """The calling process's own place."""
    return RankPlace(pool, rank, socket.gethostname(), os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def free_port(host: str = "") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
