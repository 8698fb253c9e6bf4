"""Requests of the teacher client: their headers and frames, and the checks of the replies.

A `PendingRequest` holds one request and validates replies to it. `gkd.scoring.teacher.exchange` decides when to send
it; after its submission only the exchange's thread uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from gkd.data.score_checks import check_own
from gkd.errors import TeacherError
from gkd.scoring.teacher.info import TeacherInfo
from gkd.types import Rollout, TeacherScores
from teacher_server.vision.images import EncodedImage
from teacher_server.wire.payload import (
    check_tokens,
    given_problem,
    listed_problem,
    mark_own,
    pack_given,
    pack_images,
    pack_units,
    unpack_rows,
    unpack_sampled,
    unpack_topk,
)
from teacher_server.wire.protocol import (
    ID_BYTES,
    MAX_ID,
    Buffer,
    HeadRequest,
    InfoReply,
    InfoRequest,
    ProtocolError,
    Received,
    RowsReply,
    ScoreReply,
    ScoreRequest,
    Signal,
    Wire,
    as_frame,
    checksum,
    requests,
    token_digest,
)
from teacher_server.wire.table import MASS_SLACK, Rows, check_logprobs, check_topk, row_slices

_INFO_RESEND_S = 1.0
T = TypeVar("T")
Reply = ScoreReply | RowsReply | InfoReply
Header = ScoreRequest | HeadRequest | InfoRequest
H = TypeVar("H", bound=Header, covariant=True)


@dataclass(frozen=True, slots=True)
class RequestMessage(Generic[H]):
    """Content of a request."""

    names: Sequence[str]  # identify the sequences in errors, e.g. ``prompt 17, sample 2``
    header: H
    frames: Sequence[Buffer]
    digest: bytes  # digest of the tokens; zeros if there are none
    resend_s: float  # send again if no reply arrived for this long
    given: np.ndarray | None = None  # [M, G] ids that each row of the reply must list, M of all sequences
    n_rows: Sequence[int] = ()  # rows of each sequence
    own: Sequence[np.ndarray | None] = ()  # one for each sequence, see `Rollout`
    units: np.ndarray | None = None  # map of the units that the reply lists, which a server may ask for


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Settings that all requests of one client share; see `gkd.scoring.teacher.client.ZmqTeacher`."""

    teacher: str
    k: int
    temperature: float
    n_vocab: int
    wire: Wire
    resend_s: float
    units: np.ndarray | None = None  # [V'] int32, the unit of each token; lists have these `n_vocab` units

    def for_rollouts(
        self, rollouts: Sequence[Rollout], signal: Signal, *, k: int = 0, mass: float = 0.0, with_sampled: bool = False
    ) -> RequestMessage[ScoreRequest]:
        """Request a signal of some sequences, rows for their own tokens only, for topk with the rollouts' `top_ids`.

        Raises:
            TeacherError: a value exceeds the limits of the protocol, `own` marks no token, or the `top_ids` cannot be
                given.
        """
        names = [f"prompt {rollout.prompt_id}, sample {rollout.sample_index}" for rollout in rollouts]
        rollouts = [rollout.for_teacher() for rollout in rollouts]
        for rollout, name in zip(rollouts, names, strict=True):
            check_own(rollout, name)
        given = None
        if signal == "topk" and rollouts[0].top_ids is not None:
            given = self._checked_given(rollouts, names)
        lengths = [(len(rollout.prompt_ids), rollout.n_tokens) for rollout in rollouts]
        n_rows = [rollout.n_own for rollout in rollouts]
        n_own = sum(n_rows) if sum(n_rows) < sum(len(rollout.response_ids) for rollout in rollouts) else 0
        with _refusals_of(_together(names)):
            tokens = check_tokens(np.concatenate([ids for r in rollouts for ids in (r.prompt_ids, r.response_ids)]))
            if n_own:
                marked = [ids for r in rollouts for ids in (r.prompt_ids, mark_own(r.response_ids, r.own))]
                tokens = np.concatenate(marked).astype("<i4")
            frames = [] if given is None else pack_given(given)
            places: dict[EncodedImage, int] = {}
            indices = [[places.setdefault(image, len(places)) for image in r.images] for r in rollouts]
            frames += pack_images([image.data for image in places])
            header = ScoreRequest(
                request_id=os.urandom(ID_BYTES),
                signal=signal,
                teacher=self.teacher,
                k=k,
                mass=mass,
                temperature=self.temperature,
                n_vocab=self.n_vocab,
                prompt_length=sum(n_prompt for n_prompt, _ in lengths),
                total_length=len(tokens),
                wire=self.wire,
                deadline_s=self._deadline_s,
                checksum=checksum(as_frame(tokens)),
                n_given=0 if given is None else given.shape[1],
                given_checksums=[checksum(frame) for frame in frames],
                with_sampled=with_sampled,
                lengths=lengths if len(lengths) > 1 else [],
                n_own=n_own,
                units=b"" if signal != "topk" or self.units is None else token_digest(self.units),
                image_sizes=[image.n_bytes for image in places],
                image_indices=indices if places else [],
            )
        frames = [as_frame(tokens), *frames]
        own = [rollout.own for rollout in rollouts]
        digest = token_digest(tokens, (image.digest for r in rollouts for image in r.images))
        return RequestMessage(names, header, frames, digest, self.resend_s, given, n_rows, own, self.units)

    def _checked_given(self, rollouts: Sequence[Rollout], names: Sequence[str]) -> np.ndarray:
        """Return the `top_ids` of all rollouts, [M, G]. Raises TeacherError."""
        given = []
        for rollout, name in zip(rollouts, names, strict=True):
            with _refusals_of(name):
                if rollout.top_ids is None:
                    raise ProtocolError("it has no top_ids, and others of its request have")
                if problem := given_problem(rollout.top_ids, rollout.n_own, self.id_limit):
                    raise ProtocolError(problem)
            given.append(rollout.top_ids)
        return np.concatenate(given)

    def for_head(self) -> RequestMessage[HeadRequest]:
        """Request the LM head. Raises TeacherError as `for_rollouts`."""
        name = "the LM head"
        with _refusals_of(name):
            header = HeadRequest(
                request_id=os.urandom(ID_BYTES), teacher=self.teacher, wire=self.wire, deadline_s=self._deadline_s
            )
        return RequestMessage([name], header, [], bytes(ID_BYTES), self.resend_s)

    @property
    def id_limit(self) -> int:
        """Return the upper bound (exclusive) of token ids, as far as it is known."""
        return self.n_vocab or MAX_ID + 1

    @property
    def _deadline_s(self) -> float:
        return 2 * self.resend_s  # every resend renews it


class PendingRequest(Generic[T]):
    """A request that has no complete reply yet.

    Raises:
        TeacherError: the header exceeds the limits of the protocol.
    """

    n_sequences = 1  # sequences that count toward n_in_flight
    is_stream = False
    with_units = False  # it has the map of units

    def __init__(self, message: RequestMessage[Header]) -> None:
        self.names, self.resend_s = message.names, message.resend_s
        self.future: Future[T] = Future()
        self._header, self._digest = message.header, message.digest  # a stream may change its request id
        with _refusals_of(self.name):
            self.frames: list[Buffer] = [requests.encode(message.header), *message.frames]
        self.due_s = 0.0  # next time to send it, on the exchange's clock
        self.n_sent = 0
        self.n_damaged = 0

    @property
    def name(self) -> str:
        return _together(self.names)

    @property
    def request_id(self) -> bytes:
        return self._header.request_id

    def accept(self, reply: Reply, frames: list[Buffer], now_s: float) -> T | None:
        """Check a reply; return the result, or None if more replies must follow.

        Raises:
            ProtocolError: the reply is damaged or does not match the request; resend.
            TeacherError: the scores are invalid, and would be again after a resend.
        """
        raise NotImplementedError

    def add_units(self) -> bool:
        """Add the map of units, which the server does not know. Returns False if there is none, or it was sent."""
        return False

    def needs_new_id(self, now_s: float) -> bool:
        """Return whether a resend must use a new request id, because the server ignores it under the old one."""
        return False

    def renew_id(self) -> None:
        """Take a new request id, so that the server handles the request as a new one."""
        self._header = msgspec.structs.replace(self._header, request_id=os.urandom(ID_BYTES))
        self.frames[0] = requests.encode(self._header)

    def _check_source(self, reply: ScoreReply | RowsReply) -> None:
        """Raise ProtocolError on a token digest mismatch or a missing worker name."""
        if reply.token_digest != self._digest:
            raise ProtocolError(f"the reply of worker {reply.worker!r} has another token digest")
        if not reply.worker:
            raise ProtocolError("the reply has no worker name")


class DescriptionRequest(PendingRequest[TeacherInfo]):
    """Request the teacher's description.

    Args:
        teacher: its name; empty if the server has one teacher.
    """

    n_sequences = 0

    def __init__(self, teacher: str) -> None:
        header = InfoRequest(request_id=os.urandom(ID_BYTES), teacher=teacher)
        super().__init__(RequestMessage(["the teacher's description"], header, [], bytes(ID_BYTES), _INFO_RESEND_S))
        self._teacher = teacher

    def accept(self, reply: Reply, frames: list[Buffer], now_s: float) -> TeacherInfo:
        if not isinstance(reply, InfoReply) or (self._teacher and reply.teacher != self._teacher):
            raise ProtocolError(f"not a description of teacher {self._teacher!r}")
        content = msgspec.structs.asdict(reply)
        del content["request_id"]
        return TeacherInfo(fingerprint=content.pop("model_fingerprint"), is_server=True, **content)


def _together(names: Sequence[str]) -> str:
    """Return one name for the sequences of a request."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more sequences"


@contextmanager
def _refusals_of(name: str) -> Iterator[None]:
    """Raise errors of the protocol as TeacherError with the request's name."""
    try:
        yield
    except (ProtocolError, ValueError) as error:
        raise TeacherError(f"{name}: cannot be scored: {error}") from error


# Request of the teacher client whose reply is one message: top-k scores, logprobs of the response tokens, or both.


class ScoresRequest(PendingRequest[list[TeacherScores]]):
    """Request the scores of one or several sequences.

    Args:
        n_vocab: upper bound (exclusive) of the token ids in the reply.
    """

    def __init__(self, message: RequestMessage[ScoreRequest], n_vocab: int) -> None:
        super().__init__(message)
        self.n_sequences = len(message.names)
        self._sent, self._given, self._n_vocab = message.header, message.given, n_vocab
        self._n_rows, self._own, self._units = message.n_rows, message.own, message.units

    def add_units(self) -> bool:
        if self._units is None or self.with_units:
            return False
        frames = pack_units(self._units)
        fields = {"n_mapped": len(self._units), "given_checksums": [checksum(frame) for frame in frames]}
        self._header = self._sent = msgspec.structs.replace(self._sent, **fields)
        self.frames = [requests.encode(self._sent), self.frames[1], *frames]
        self.with_units = True
        return True

    def accept(self, reply: Reply, frames: list[Buffer], now_s: float) -> list[TeacherScores]:
        checked = self._check(reply)
        if checked.signal == "topk":
            table = unpack_topk(checked, frames)
            joined = TeacherScores(replace(table, sampled=None), table.sampled)
        else:
            joined = TeacherScores(sampled_logprobs=unpack_sampled(checked, frames))
        parts = row_slices(self._n_rows)
        names = [f"{name}, from worker {checked.worker!r}" for name in self.names]
        self._validate(joined, Rows(names, self._n_rows, self._own), parts)
        return [joined] if len(parts) == 1 else [_part(joined, part) for part in parts]

    def _check(self, reply: Reply) -> ScoreReply:
        sent = self._sent
        if not isinstance(reply, ScoreReply):
            raise ProtocolError(f"received {type(reply).__name__} for a {sent.signal} request")
        self._check_source(reply)
        received = (reply.signal, reply.n_rows, reply.k, reply.wire, reply.adaptive, reply.with_sampled)
        expected = (sent.signal, sent.n_rows, sent.k, sent.wire, sent.mass > 0, sent.with_sampled)
        if received != expected:
            raise ProtocolError(f"(signal, rows, k, wire, adaptive, with_sampled) are {received}, expected {expected}")
        return reply

    def _validate(self, scores: TeacherScores, rows: Rows, parts: Sequence[slice]) -> None:
        """Check the scores of all sequences. Raises TeacherError, which names one."""
        table, given, sent = scores.topk, self._given, self._sent
        if table is not None:
            check_topk(table, self._n_vocab, rows)
            if table.counts is not None:
                short = (table.counts < sent.k) & (1 - table.tail < sent.mass - MASS_SLACK)
                row = int(short.argmax())
                mass = f"{table.counts[row]} of {sent.k} entries have a mass of {1 - table.tail[row]:.6g}"
                rows.refuse(short, f"{mass}, below the target of {sent.mass:g}")
            if given is not None and listed_problem(given, table.ids):
                for name, part in zip(rows.names, parts, strict=True):  # which sequence is it?
                    if problem := listed_problem(given[part], table.ids[part]):
                        raise TeacherError(f"{name}: {problem}")
        if scores.sampled_logprobs is not None:
            check_logprobs(rows, scores.sampled_logprobs)


def _part(scores: TeacherScores, rows: slice) -> TeacherScores:
    """Return some rows of the tables, as views."""
    table = None if scores.topk is None else scores.topk.rows(rows)
    sampled = None if scores.sampled_logprobs is None else scores.sampled_logprobs[rows]
    return TeacherScores(table, sampled)


# Requests whose result is a matrix, received in row blocks, in order and without gaps.
#
# If a worker fails during a stream, another worker starts a new stream at row 0. The messages of a stream are numbered.
# A message lost with a connection therefore shows as a gap, and the request is sent again under a new id.


_MAX_SENT = 3  # sends of a request under one id while no stream has started


class MatrixRequest(PendingRequest[T]):
    """Request a matrix and assemble it in place: holds one message in addition to it.

    Args:
        shape: (rows, columns) of the matrix.
        acknowledge: sends a `Received` to the server.
        result: makes the request's result of the matrix.
        dtype: of the matrix.
    """

    is_stream = True

    def __init__(
        self,
        message: RequestMessage[ScoreRequest | HeadRequest],
        shape: tuple[int, int],
        acknowledge: Callable[[Received], None],
        result: Callable[[np.ndarray], T],
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__(message)
        header = message.header
        self._signal = header.signal if isinstance(header, ScoreRequest) else "head"
        self._shape, self._wire, self._acknowledge = shape, header.wire, acknowledge
        self._result, self._dtype = result, dtype
        self._rows: np.ndarray | None = None
        self._n_sent_before = 0  # under earlier request ids
        self._reset_stream()

    def _reset_stream(self) -> None:
        self._stream_id, self._worker = b"", ""
        self._ended: set[bytes] = set()  # ids of replaced streams of this request
        self._received_s = 0.0
        self._n_messages = self._next_row = 0  # state of the current stream

    def renew_id(self) -> None:
        super().renew_id()
        self._reset_stream()
        self._n_sent_before = self.n_sent

    def needs_new_id(self, now_s: float) -> bool:
        if self._stream_id:
            return now_s - self._received_s >= self.resend_s
        return self.n_sent - self._n_sent_before >= _MAX_SENT

    def accept(self, reply: Reply, frames: list[Buffer], now_s: float) -> T | None:
        message = self._check(reply)
        if message.stream_id in self._ended:
            return None
        if message.stream_id != self._stream_id:
            self._begin(message)
        if message.index < self._n_messages:
            return None  # a duplicate
        if (message.index, message.start) != (self._n_messages, self._next_row):
            raise ProtocolError(
                f"message {message.index} of the stream starts at row {message.start}, expected message "
                f"{self._n_messages} at row {self._next_row}"
            )
        if message.worker != self._worker:
            raise ProtocolError(f"worker {message.worker!r} continued a stream of worker {self._worker!r}")
        self._put(message, unpack_rows(message, frames))
        self._n_messages, self._next_row, self._received_s = message.index + 1, message.stop, now_s
        done = Received(request_id=self.request_id, stream_id=message.stream_id, n_messages=self._n_messages)
        self._acknowledge(done)
        if message.stop < message.n_rows:
            return None
        assert self._rows is not None  # a message has at least one row
        return self._result(self._rows)

    def _check(self, reply: Reply) -> RowsReply:
        if not isinstance(reply, RowsReply):
            raise ProtocolError(f"received {type(reply).__name__} for a {self._signal} request")
        self._check_source(reply)
        received, expected = (reply.signal, reply.n_rows, reply.n_cols), (self._signal, *self._shape)
        if received != expected:
            raise ProtocolError(f"(signal, rows, columns) are {received}, expected {expected}")
        if self._wire == "fp16" and reply.dtype == "float32":
            raise ProtocolError("received float32 rows for a request with wire fp16")
        return reply

    def _begin(self, reply: RowsReply) -> None:
        if reply.index:
            raise ProtocolError(f"the first message of a stream has index {reply.index}")
        self._ended.add(self._stream_id)
        self._stream_id, self._worker = reply.stream_id, reply.worker
        self._n_messages = self._next_row = 0

    def _put(self, message: RowsReply, rows: np.ndarray) -> None:
        if self._signal == "logits" and rows.max(1).any():
            raise TeacherError(f"{self.name}, from worker {message.worker!r}: the largest logit of a row is not 0")
        if self._rows is None:
            self._rows = np.empty(self._shape, self._dtype)
        self._rows[message.start : message.stop] = rows
