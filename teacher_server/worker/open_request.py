"""A request at a worker: its sequences, and their scores until all can be sent; a matrix is sent in chunks of rows.

The chunks stay within the window of messages that the client has not confirmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from teacher_server.engines.base import RowStream, ScoreParams, Scores, TokenSequence, UnitMap
from teacher_server.vision.images import EncodedImage
from teacher_server.wire.payload import (
    pack_rows,
    pack_sampled,
    pack_topk,
    rows_per_message,
    unmarked,
    unpack_given,
    unpack_images,
    unpack_tokens,
    unpack_units,
)
from teacher_server.wire.protocol import (
    STREAM_WINDOW,
    Buffer,
    ProtocolError,
    RowsReply,
    ScoreReply,
    ScoreRequest,
    checksum,
    replies,
    token_digest,
)
from teacher_server.wire.table import TopKTable
from teacher_server.wire.worker_protocol import Assignment, images_of

_MAX_MAPS = 16  # 600 kB each for 150k tokens


@dataclass(slots=True, eq=False)
class OpenRequest:
    """Times are on this process's monotonic clock."""

    job: Assignment
    header: ScoreRequest
    digest: bytes  # digest of its tokens
    received_s: float
    scores: dict[int, Scores] = field(default_factory=dict)  # sequence's index -> scores
    started_s: float = 0.0  # start of the forward pass of its first sequence
    refused: bool = False
    units: UnitMap | None = None
    params: ScoreParams = field(init=False)

    def __post_init__(self) -> None:
        r = self.header
        # Only streams depend on the wire format before packing; scores of both formats share a batch.
        wire = r.wire if r.signal in ("logits", "hidden") else "fp32"
        numbers = r.k, r.mass, r.temperature, r.n_vocab
        self.params = ScoreParams(r.signal, *numbers, wire, r.n_given, r.with_sampled, self.units)

    @property
    def deadline_s(self) -> float:
        return self.received_s + self.job.remaining_s

    @property
    def queue_s(self) -> float:
        """Return the time from its arrival at the broker to its first forward pass."""
        return self.job.waited_s + self.started_s - self.received_s

    def add(self, index: int, scored: Scores, started_s: float) -> bool:
        """Add the scores of one sequence; return whether all sequences have theirs."""
        self.started_s = self.started_s or started_s
        self.scores[index] = scored
        return len(self.scores) == len(self.header.sequences)

    def reply(self, model_fingerprint: str, worker: str, compute_s: float) -> list[Buffer]:
        """Return the header and the frames of the reply with the scores of all sequences, one after the other."""
        scored = _join([self.scores[index] for index in range(len(self.scores))])
        request = self.header
        counts = scored.counts if isinstance(scored, TopKTable) else None
        header = ScoreReply(
            request_id=request.request_id,
            token_digest=self.digest,
            model_fingerprint=model_fingerprint,
            worker=worker,
            signal="topk" if isinstance(scored, TopKTable) else "sampled",
            n_rows=request.n_rows,
            k=request.k,
            n_entries=request.n_rows * request.k if counts is None else int(counts.sum()),
            adaptive=counts is not None,
            wire=request.wire,
            checksums=[],
            queue_s=self.queue_s,
            compute_s=compute_s,
            with_sampled=request.with_sampled,
        )
        frames = pack_topk(scored, header) if isinstance(scored, TopKTable) else pack_sampled(scored, header)
        header.checksums = [checksum(frame) for frame in frames]
        return [replies.encode(header), *frames]


class UnitMaps:
    """Maps of units that clients have sent, the last ones, so that a client sends its map once to each worker."""

    def __init__(self) -> None:
        self._known: dict[bytes, UnitMap] = {}  # digest -> map, in the order of their last use

    def of(self, header: ScoreRequest, frames: Sequence[Buffer]) -> UnitMap | None:
        """Return the map of a request, None if it asks for tokens. Raises as `open_request`.

        Args:
            frames: those after the token ids, which `unpack_given` has checked.
        """
        if not header.units:
            return None
        sent = unpack_units(header, frames)
        unit_map = self._known.pop(header.units, None) or (None if sent is None else UnitMap(header.units, sent.copy()))
        if unit_map is None:
            raise LookupError("the map of units is not known here")
        if unit_map.units.max() >= header.n_vocab:  # only a map that is in the message was checked
            raise ProtocolError(f"the map of units has more than {header.n_vocab} units")
        self._known[header.units] = unit_map
        if len(self._known) > _MAX_MAPS:
            del self._known[next(iter(self._known))]
        return unit_map


def open_request(
    job: Assignment, header: ScoreRequest, frames: Sequence[Buffer], now_s: float, maps: UnitMaps
) -> tuple[OpenRequest, list[TokenSequence]]:
    """Return a request that has arrived, and its sequences.

    Args:
        frames: those after the header.

    Raises:
        ProtocolError: the frames do not match the header.
        LookupError: the map of units is not known here, and the request does not have it.
    """
    tokens = unpack_tokens(header, frames[:1])
    given_ids = unpack_given(header, frames[1:])
    units = maps.of(header, frames[1:])
    images = images_of(header, [EncodedImage(data.tobytes()) for data in unpack_images(header, frames[1:])])
    sequences = []
    start = 0
    row = 0
    for (n_prompt, n_total), own_images in zip(header.sequences, images, strict=True):
        marked = tokens[start : start + n_total]
        ids, is_own = (unmarked(marked), marked[n_prompt:] >= 0) if header.n_own else (marked, None)
        sequence = TokenSequence(ids, n_prompt, own=is_own, images=own_images)
        rows = slice(row, row := row + sequence.n_rows)
        sequences.append(sequence if given_ids is None else replace(sequence, given=given_ids[rows]))
        start += n_total
    digest = token_digest(tokens, (image.digest for image in chain(*images)))
    return OpenRequest(job, header, digest, now_s, units=units), sequences


def _join(results: Sequence[TopKTable | np.ndarray | RowStream]) -> TopKTable | np.ndarray:
    """Join the rows of several sequences; the protocol allows no streams of them."""
    tables = [part for part in results if isinstance(part, TopKTable)]
    if tables:
        return TopKTable.join(tables)
    return np.concatenate([part for part in results if isinstance(part, np.ndarray)])


_AT_ONCE = STREAM_WINDOW // 2  # messages per call of the engine, because small matrix products are slow


@dataclass(slots=True, eq=False)
class OpenStream:
    """One stream of a worker."""

    job_id: bytes
    stream_id: bytes
    rows: RowStream
    header: RowsReply  # common to all messages; index, start, stop and checksums are set for each one
    timeout_s: float  # without a receipt for this long the stream is closed
    deadline_s: float = 0.0
    index: int = 0
    start: int = 0
    received: int = 0

    @property
    def may_send(self) -> bool:
        return self.index - self.received + _AT_ONCE <= STREAM_WINDOW

    @property
    def finished(self) -> bool:
        return self.start == self.rows.n_rows

    def next_messages(self) -> list[tuple[list[Buffer], bool]]:
        """Compute up to four messages: (frames for the client, whether it is the last). Engine errors propagate."""
        step = rows_per_message(self.rows.n_cols, self.rows.dtype)
        first = self.start
        end = min(self.start + _AT_ONCE * step, self.rows.n_rows)
        chunk = self.rows.rows(first, end)
        messages: list[tuple[list[Buffer], bool]] = []
        for start in range(first, end, step):
            stop = min(start + step, end)
            frames = pack_rows(chunk[start - first : stop - first])
            self.header.index = self.index
            self.header.start = start
            self.header.stop = stop
            self.header.checksums = [checksum(frame) for frame in frames]
            messages.append(([replies.encode(self.header), *frames], stop == self.rows.n_rows))
            self.index = self.index + 1
            self.start = stop
        return messages
