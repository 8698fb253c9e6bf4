"""Which waiting requests make the next forward pass: the oldest, and those that fit beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from teacher_server.engines.base import ScoreParams, TokenSequence
from teacher_server.protocol import ScoreRequest


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """A request at a worker. Times are on this process's monotonic clock."""

    job_id: bytes
    request: ScoreRequest
    sequence: TokenSequence
    received_s: float
    waited_s: float  # in the broker, before it came here
    deadline_s: float

    @property
    def params(self) -> ScoreParams:
        return ScoreParams(self.request.k, self.request.temperature, self.request.n_vocab)


def take_batch(waiting: list[WorkItem], max_batch_tokens: int) -> list[WorkItem]:
    """Remove and return the next batch; `waiting` is in order of arrival and not empty.

    The oldest item is always in it, so none starves; then those of the same parameters, nearest in
    length first, while sequences x longest (what padding really costs) stays within
    `max_batch_tokens`. A sequence longer than the budget goes alone.
    """
    oldest = waiting[0]
    length = oldest.request.total_length
    batch, longest = [oldest], length
    for item in _nearest_first(waiting[1:], length):
        longest_with = max(longest, item.request.total_length)
        if item.params == oldest.params and (len(batch) + 1) * longest_with <= max_batch_tokens:
            batch.append(item)
            longest = longest_with
    taken = {id(item) for item in batch}
    waiting[:] = [item for item in waiting if id(item) not in taken]
    return batch


def _nearest_first(items: Sequence[WorkItem], length: int) -> list[WorkItem]:
    return sorted(items, key=lambda item: abs(item.request.total_length - length))
