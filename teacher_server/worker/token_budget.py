"""Select the requests of the next forward pass: the oldest, and others that fit the token budget with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from teacher_server.engines.base import ScoreParams, TokenSequence
from teacher_server.wire.protocol import ScoreRequest
from teacher_server.wire.worker_protocol import Assignment


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """A request at a worker. Times are on this process's monotonic clock."""

    job: Assignment
    request: ScoreRequest
    sequence: TokenSequence
    digest: bytes  # of its tokens
    received_s: float
    waited_s: float  # in the broker, before this worker received it
    deadline_s: float

    @property
    def job_id(self) -> bytes:
        return self.job.job_id

    @property
    def params(self) -> ScoreParams:
        r = self.request
        # Only streams depend on the wire format before packing; scores of both formats share a batch.
        wire = r.wire if r.signal in ("logits", "hidden") else "fp32"
        return ScoreParams(r.signal, r.k, r.mass, r.temperature, r.n_vocab, wire, r.n_given, r.with_sampled)


def take_batch(waiting: list[WorkItem], max_batch_tokens: int) -> list[WorkItem]:
    """Remove and return the next batch. `waiting` is in order of arrival and not empty.

    The batch contains the oldest item, so no request starves. Items with the same parameters are added,
    nearest in length first, while sequences x longest length (the padded tokens) is at most
    `max_batch_tokens`. A sequence longer than the budget is a batch by itself.
    """
    oldest = waiting[0]
    length, params = oldest.request.total_length, oldest.params
    batch, longest = [oldest], length
    for item in _nearest_first(waiting[1:], length):
        longest_with = max(longest, item.request.total_length)
        if (len(batch) + 1) * longest_with <= max_batch_tokens and item.params == params:
            batch.append(item)
            longest = longest_with
    taken = {id(item) for item in batch}
    waiting[:] = [item for item in waiting if id(item) not in taken]
    return batch


def _nearest_first(items: Sequence[WorkItem], length: int) -> list[WorkItem]:
    return sorted(items, key=lambda item: abs(item.request.total_length - length))
