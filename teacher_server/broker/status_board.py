"""Count the broker's events, and publish its status for other threads."""

from __future__ import annotations

import math
import time
from collections import Counter

from teacher_server.broker.request_queue import RequestQueue
from teacher_server.broker.teachers import Teachers
from teacher_server.wire.protocol import ErrorCode
from teacher_server.wire.status import ServerStatus, WorkerStatus

_REFRESH_S = 0.5
_RATE_S = 10.0  # time constant of tokens/s
_OF_HELLO = ("name", "teacher", "host", "pid", "engine", "device", "dtype", "gpus", "cuda_visible_devices")


class StatusBoard:
    """Counters of the broker and its latest status. `latest` is replaced, never modified, so readers need no lock."""

    def __init__(self, epoch: bytes, request_queue: RequestQueue, teachers: Teachers) -> None:
        self.n_answered = 0
        self.n_lost_workers = 0
        self.n_errors: Counter[ErrorCode] = Counter()
        self.excluded: dict[str, str] = {}
        self.draining = False
        self._epoch = epoch
        self._queue = request_queue
        self._teachers = teachers
        self._started_s = self._refreshed_s = time.monotonic()
        self._tokens_before: dict[bytes, int] = {}
        self.latest = self._build(self._started_s)

    def tick(self, now_s: float) -> None:
        """Update the rates and `latest` if half a second has passed."""
        elapsed_s = now_s - self._refreshed_s
        if elapsed_s < _REFRESH_S:
            return
        share = 1 - math.exp(-elapsed_s / _RATE_S)
        for identity, worker in self._queue.workers.items():
            rate = (worker.n_tokens_done - self._tokens_before.get(identity, 0)) / elapsed_s
            worker.tokens_per_s += share * (rate - worker.tokens_per_s)
        self._tokens_before = {key: worker.n_tokens_done for key, worker in self._queue.workers.items()}
        self._refreshed_s = now_s
        self.latest = self._build(now_s)

    def now(self) -> ServerStatus:
        """Return the current status. Call it from the broker's thread only."""
        self.latest = self._build(time.monotonic())
        return self.latest

    def _build(self, now_s: float) -> ServerStatus:
        request_queue = self._queue
        return ServerStatus(
            epoch=self._epoch.hex(),
            uptime_s=now_s - self._started_s,
            draining=self.draining,
            n_queued=request_queue.n_queued,
            queued_bytes=request_queue.queued_bytes,
            n_answered=self.n_answered,
            n_errors={str(code): count for code, count in self.n_errors.items()},
            n_retried=request_queue.n_retried,
            n_lost_workers=self.n_lost_workers,
            excluded=dict(self.excluded),
            teachers=self._teachers.statuses(request_queue),
            workers=[
                WorkerStatus(
                    **{field: getattr(worker.hello, field) for field in _OF_HELLO},
                    state="draining" if worker.leaving else "ready",
                    n_in_flight=len(worker.outstanding),
                    tokens_in_flight=worker.n_tokens,
                    n_done=worker.n_done,
                    n_tokens=worker.n_tokens_done,
                    tokens_per_s=worker.tokens_per_s,
                    queue_s=worker.queue_s,
                    compute_s=worker.compute_s,
                    last_heard_s=max(0.0, now_s - worker.last_heard_s),
                )
                for worker in request_queue.workers.values()
            ],
        )
