"""Select the sequences of the next forward pass: the oldest, and others that fit the token budget with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from teacher_server.engines.base import TokenSequence
from teacher_server.wire.prompts import computed_tokens
from teacher_server.wire.protocol import as_frame, checksum
from teacher_server.worker.open_request import OpenRequest


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """A sequence that waits for its forward pass."""

    request: OpenRequest
    index: int  # position in the request
    sequence: TokenSequence
    prompt: int = field(init=False)  # digest

    def __post_init__(self) -> None:
        digest = checksum(as_frame(self.sequence.token_ids[: self.sequence.prompt_length]))
        object.__setattr__(self, "prompt", digest)

    @property
    def n_tokens(self) -> int:
        return len(self.sequence.token_ids)


class _Budget:
    """Tokens of a batch: whole sequences, and further ones of their prompts, each padded to their longest if `pads`."""

    def __init__(self, prefix_block: int, pads: bool) -> None:
        self._block, self._pads, self._n_tokens = prefix_block, pads, 0
        self._prompts = set[int]()
        self._wholes = self._others = (0, 0)  # number, longest

    def add(self, item: WorkItem, limit: float = math.inf) -> bool:
        """Add `item` if all tokens together are at most `limit` then; return whether it was added."""
        known = item.prompt in self._prompts
        n_tokens = computed_tokens(item.sequence.prompt_length, item.n_tokens, self._block, known=known)
        wholes, others = self._wholes, self._others
        if n_tokens == item.n_tokens:
            wholes = wholes[0] + 1, max(wholes[1], n_tokens)
        else:
            others = others[0] + 1, max(others[1], n_tokens)
        n_padded = wholes[0] * wholes[1] + others[0] * others[1]
        if (n_padded if self._pads else self._n_tokens + n_tokens) > limit:
            return False
        self._wholes, self._others = wholes, others
        self._n_tokens += n_tokens
        self._prompts.add(item.prompt)
        return True


def take_batch(
    waiting: list[WorkItem], max_batch_tokens: int, prefix_block: int = 0, *, pads: bool = True
) -> list[WorkItem]:
    """Remove and return the next batch. `waiting` is in order of arrival and not empty.

    The batch contains the oldest item, so no request starves. Items with the same parameters are added,
    nearest in length first, while the tokens that the engine computes (padded: sequences x longest length) are at most
    `max_batch_tokens`. A sequence longer than the budget is a batch by itself.

    Args:
        prefix_block: of the engine; with it, sequences with the same prompt stay together, and `computed_tokens` counts
            them.
        pads: whether the engine pads the sequences of a batch to the longest one.
    """
    params, budget = waiting[0].request.params, _Budget(prefix_block, pads)
    budget.add(waiting[0])
    others = _nearest_first(waiting, together=prefix_block > 0)
    batch = [
        waiting[0],
        *(item for item in others if item.request.params == params and budget.add(item, max_batch_tokens)),
    ]
    taken = {id(item) for item in batch}
    waiting[:] = [item for item in waiting if id(item) not in taken]
    return batch


def _nearest_first(waiting: Sequence[WorkItem], *, together: bool) -> list[WorkItem]:
    """Return all items but the oldest, sorted by their distance in length from it.

    Args:
        together: sort whole groups with a common prompt by their nearest item; the group of the oldest is the first.
    """
    oldest, items = waiting[0], waiting[1:]
    distances = [abs(item.n_tokens - oldest.n_tokens) for item in items]
    if not together:
        return [item for _, _, item in sorted(zip(distances, range(len(items)), items, strict=True))]
    groups = {oldest.prompt: (-1, -1)}  # prompt -> distance of its nearest item, position of its oldest item
    for position, (distance, item) in enumerate(zip(distances, items, strict=True)):
        nearest, first = groups.get(item.prompt, (distance, position))
        groups[item.prompt] = min(nearest, distance), first
    keys = [(groups[item.prompt], distance) for item, distance in zip(items, distances, strict=True)]
    return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__)]
