"""Select the sequences of the next forward pass: the oldest, and others that fit the token budget with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from teacher_server.engines.base import TokenSequence
from teacher_server.worker.open_request import OpenRequest


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """A sequence that waits for its forward pass."""

    request: OpenRequest
    index: int  # position in the request
    sequence: TokenSequence

    @property
    def n_tokens(self) -> int:
        return len(self.sequence.token_ids)


def take_batch(waiting: list[WorkItem], max_batch_tokens: int) -> list[WorkItem]:
    """Remove and return the next batch. `waiting` is in order of arrival and not empty.

    The batch contains the oldest item, so no request starves. Items with the same parameters are added,
    nearest in length first, while sequences x longest length (the padded tokens) is at most
    `max_batch_tokens`. A sequence longer than the budget is a batch by itself.
    """
    oldest = waiting[0]
    length, params = oldest.n_tokens, oldest.request.params
    batch, longest = [oldest], length
    for item in _nearest_first(waiting[1:], length):
        longest_with = max(longest, item.n_tokens)
        if (len(batch) + 1) * longest_with <= max_batch_tokens and item.request.params == params:
            batch.append(item)
            longest = longest_with
    taken = {id(item) for item in batch}
    waiting[:] = [item for item in waiting if id(item) not in taken]
    return batch


def _nearest_first(items: Sequence[WorkItem], length: int) -> list[WorkItem]:
    return sorted(items, key=lambda item: abs(item.n_tokens - length))
