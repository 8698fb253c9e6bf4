"""Keep the last version that a rank sent, in host memory, for engines that are started again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gkd.errors import WeightSyncError
from gkd.weight_sync.buckets import Bucket, Content, layout
from gkd.weight_sync.segment import Segment


class KeptVersion:
    """The buckets of the last version by content. Their memory is reused by the next version."""

    def __init__(self) -> None:
        self._contents: dict[Content, tuple[list[Bucket], Segment]] = {}
        self._complete: set[Content] = set()

    @contextmanager
    def replacing(self, content: Content, buckets: Sequence[Bucket], *, pinned: bool) -> Iterator[Segment]:
        """Yield the memory of the buckets, one behind the other, to be filled in this context.

        Args:
            pinned: the buckets are copied from a GPU.

        After an error the content is incomplete. Raises WeightSyncError: there is not enough memory.
        """
        self._complete.discard(content)
        if content not in self._contents or self._contents[content][0] != list(buckets):
            self._contents.pop(content, None)  # free it first
            self._contents[content] = list(buckets), Segment(layout(buckets)[1], pinned=pinned)
        yield self._contents[content][1]
        self._complete.add(content)

    def complete(self, content: Content) -> tuple[list[Bucket], Segment]:
        """Return the buckets and their memory. Raises WeightSyncError: they are not complete."""
        if content not in self._complete:
            raise WeightSyncError(f"no complete version of the {content} weights is kept on this rank")
        return self._contents[content]
