"""Keep the last version that a rank sent, in host memory, for engines that are started again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from gkd.errors import WeightSyncError
from gkd.weight_sync.buckets import Bucket, Content


class KeptVersion:
    """The buckets of the last version by content. Their memory is reused by the next version."""

    def __init__(self) -> None:
        self._buckets: dict[Content, list[tuple[Bucket, torch.Tensor]]] = {}
        self._complete: set[Content] = set()

    @contextmanager
    def replacing(self, content: Content, buckets: Sequence[Bucket]) -> Iterator[list[torch.Tensor]]:
        """Yield one buffer for each bucket, to be filled in this context; after an error the content is incomplete."""
        self._complete.discard(content)
        kept = self._buckets.get(content, [])
        if [bucket for bucket, _ in kept] != list(buckets):
            kept = [(bucket, torch.empty(bucket.n_bytes, dtype=torch.uint8)) for bucket in buckets]
            self._buckets[content] = kept
        yield [buffer for _, buffer in kept]
        self._complete.add(content)

    def filled(self, content: Content) -> list[tuple[Bucket, torch.Tensor]]:
        """Return the buckets of a content as `fill` yields them. Raises WeightSyncError: they are not complete."""
        if content not in self._complete:
            raise WeightSyncError(f"no complete version of the {content} weights is kept on this rank")
        return self._buckets[content]
