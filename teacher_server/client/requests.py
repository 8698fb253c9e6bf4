"""Requests of a client: their headers and frames, and the checks of the replies.

A request holds one header and its frames, and checks replies to it. `teacher_server.client.client` decides when to send
it; after its submission only the client's thread uses it.

Letters: P prompt tokens, R response tokens, M of them have rows, K top-k entries, G given ids, V' tokens of a map.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from teacher_server.errors import TeacherError
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
    GenerateReply,
    GenerateRequest,
    HeadRequest,
    InfoReply,
    InfoRequest,
    ProtocolError,
    Received,
    RowsReply,
    ScoreReply,
    ScoreRequest,
    ServerMessage,
    Signal,
    StatusReply,
    StatusRequest,
    Wire,
    as_frame,
    checksum,
    requests,
    token_digest,
)
from teacher_server.wire.status import decode_status
from teacher_server.wire.table import MASS_SLACK, Rows, TopKTable, check_logprobs, check_topk, row_slices

_SHORT_RESEND_S = 1.0  # resend time of requests that need no worker
_MAX_SENT = 3  # sends of a stream's request under one id while no stream has started
Scored = TopKTable | np.ndarray  # one sequence's scores; an array has the logprobs of its response tokens


@dataclass(frozen=True, slots=True)
class NamedSequence:
    """A sequence to score."""

    name: str  # identifies it in errors, e.g. ``prompt 17, sample 2``
    prompt_ids: np.ndarray  # [P] int32
    response_ids: np.ndarray  # [R] int32
    own: np.ndarray | None = None  # [R] bool, the response tokens that have rows, at least one; None means all
    given: np.ndarray | None = None  # [M, G] ids that each row of a top-k must list
    images: tuple[EncodedImage, ...] = ()  # in the order of their tokens

    @property
    def n_rows(self) -> int:
        """Return M."""
        return len(self.response_ids) if self.own is None else int(np.count_nonzero(self.own))


@dataclass(frozen=True, slots=True)
class RequestMessage:
    """Content of a request."""

    header: ScoreRequest | HeadRequest | GenerateRequest | InfoRequest | StatusRequest
    frames: Sequence[Buffer] = ()
    digest: bytes = b""  # digest of the tokens, which replies repeat; zeros for the LM head
    resend_s: float = _SHORT_RESEND_S  # send again if no reply arrived for this long
    sequences: Sequence[NamedSequence] = ()
    given: np.ndarray | None = None  # [M, G] ids that each row of the reply must list, M of all sequences
    units: np.ndarray | None = None  # map of the units that the reply lists, which a server may ask for
    what: str = ""  # what it requests, for errors, if it has no sequences

    @property
    def names(self) -> list[str]:
        """Return a name of each sequence, or of what is requested."""
        return [sequence.name for sequence in self.sequences] or [self.what]


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Settings that all requests of one client share. The fields of `ScoreRequest` have these names, too."""

    teacher: str
    k: int
    temperature: float
    n_vocab: int
    wire: Wire
    resend_s: float
    units: np.ndarray | None = None  # [V'] int32, the unit of each token; lists have these `n_vocab` units

    def score(
        self,
        sequences: Sequence[NamedSequence],
        signal: Signal,
        *,
        k: int = 0,
        mass: float = 0.0,
        with_sampled: bool = False,
    ) -> RequestMessage:
        """Request a signal of some sequences.

        Raises:
            TeacherError: a value exceeds the limits of the protocol, or the ids cannot be given.
        """
        given_ids = None
        if signal == "topk" and sequences[0].given is not None:
            given_ids = self._checked_given(sequences)
        n_rows = sum(sequence.n_rows for sequence in sequences)
        n_own = n_rows if n_rows < sum(len(sequence.response_ids) for sequence in sequences) else 0
        lengths = [(len(s.prompt_ids), len(s.prompt_ids) + len(s.response_ids)) for s in sequences]
        with refusals_of(_together([sequence.name for sequence in sequences])):
            tokens = check_tokens(np.concatenate([ids for s in sequences for ids in (s.prompt_ids, s.response_ids)]))
            if n_own:
                marked = [ids for s in sequences for ids in (s.prompt_ids, mark_own(s.response_ids, s.own))]
                tokens = np.concatenate(marked).astype("<i4")
            frames = [] if given_ids is None else pack_given(given_ids)
            places: dict[EncodedImage, int] = {}
            indices = [[places.setdefault(image, len(places)) for image in s.images] for s in sequences]
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
                deadline_s=2 * self.resend_s,  # every resend renews it
                checksum=checksum(as_frame(tokens)),
                n_given=0 if given_ids is None else given_ids.shape[1],
                given_checksums=[checksum(frame) for frame in frames],
                with_sampled=with_sampled,
                lengths=lengths if len(lengths) > 1 else [],
                n_own=n_own,
                units=b"" if signal != "topk" or self.units is None else token_digest(self.units),
                image_sizes=[image.n_bytes for image in places],
                image_indices=indices if places else [],
            )
        digest = token_digest(tokens, (image.digest for sequence in sequences for image in sequence.images))
        all_frames = [as_frame(tokens), *frames]
        return RequestMessage(header, all_frames, digest, self.resend_s, sequences, given_ids, self.units)

    def _checked_given(self, sequences: Sequence[NamedSequence]) -> np.ndarray:
        """Return the given ids of all sequences, [M, G]. Raises TeacherError."""
        id_arrays = []
        for sequence in sequences:
            with refusals_of(sequence.name):
                if sequence.given is None:
                    raise ProtocolError("it has no top_ids, and others of its request have")
                if problem := given_problem(sequence.given, sequence.n_rows, self.n_vocab or MAX_ID + 1):
                    raise ProtocolError(problem)
            id_arrays.append(sequence.given)
        return np.concatenate(id_arrays)

    def head(self) -> RequestMessage:
        """Request the LM head. Raises TeacherError as `score`."""
        with refusals_of("the LM head"):
            header = HeadRequest(
                request_id=os.urandom(ID_BYTES), teacher=self.teacher, wire=self.wire, deadline_s=2 * self.resend_s
            )
        return RequestMessage(header, digest=bytes(ID_BYTES), resend_s=self.resend_s, what="the LM head")


def _together(names: Sequence[str]) -> str:
    """Return one name for the sequences of a request."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more sequences"


@contextmanager
def refusals_of(name: str) -> Iterator[None]:
    """Raise errors of the protocol as TeacherError with the request's name."""
    try:
        yield
    except (ProtocolError, ValueError) as error:
        raise TeacherError(f"{name}: cannot be scored: {error}") from error


class Request(ABC):
    """A request that has no complete reply yet. Raises TeacherError: the header exceeds the limits of the protocol."""

    n_sequences = 0  # sequences that count toward n_in_flight; 0: it does not wait for the window
    is_stream = False
    with_units = False  # it has the map of units

    def __init__(self, message: RequestMessage) -> None:
        self.names = message.names
        self.header = message.header
        self.resend_s = message.resend_s
        self.future: Future[Any] = Future()
        self._message = message
        with refusals_of(self.name):
            self.frames: list[Buffer] = [requests.encode(message.header), *message.frames]
        self.receipt: Received | None = None  # what the client has to send to the server after `accept`
        self.due_s = 0.0  # next time to send it, on the client's clock
        self.n_sent = 0
        self.n_damaged = 0

    @property
    def name(self) -> str:
        return _together(self.names)

    @property
    def request_id(self) -> bytes:
        return self.header.request_id

    @abstractmethod
    def accept(self, reply: ServerMessage, frames: list[Buffer], now_s: float) -> Any:
        """Check a reply; return the result, or None if more replies must follow.

        Raises:
            ProtocolError: the reply is damaged or does not match the request; resend.
            TeacherError: the scores are invalid, and would be again after a resend.
        """

    def add_units(self) -> bool:
        """Add the map of units, which the server does not know. Returns False if there is none, or it was sent."""
        return False

    def needs_new_id(self, now_s: float) -> bool:
        """Return whether a resend must use a new request id, because the server ignores it under the old one."""
        return False

    def renew_id(self) -> None:
        """Take a new request id, so that the server handles the request as a new one."""
        self.header = msgspec.structs.replace(self.header, request_id=os.urandom(ID_BYTES))
        self.frames[0] = requests.encode(self.header)

    def _check_source(self, reply: ScoreReply | RowsReply | GenerateReply) -> None:
        """Raise ProtocolError on a token digest mismatch or a missing worker name."""
        if reply.token_digest != self._message.digest:
            raise ProtocolError(f"the reply of worker {reply.worker!r} has another token digest")
        if not reply.worker:
            raise ProtocolError("the reply has no worker name")


class InfoCall(Request):
    """Request the description of a teacher: an `InfoReply`. The name may be empty if the server has one teacher."""

    def __init__(self, teacher: str) -> None:
        header = InfoRequest(request_id=os.urandom(ID_BYTES), teacher=teacher)
        super().__init__(RequestMessage(header, what="the teacher's description"))
        self._teacher = teacher

    def accept(self, reply: ServerMessage, frames: list[Buffer], now_s: float) -> InfoReply:
        if not isinstance(reply, InfoReply) or (self._teacher and reply.teacher != self._teacher):
            raise ProtocolError(f"not a description of teacher {self._teacher!r}")
        return reply


class StatusCall(Request):
    """Request the server's status: a `ServerStatus`."""

    def __init__(self) -> None:
        super().__init__(RequestMessage(StatusRequest(request_id=os.urandom(ID_BYTES)), what="the server's status"))

    def accept(self, reply: ServerMessage, frames: list[Buffer], now_s: float) -> Any:
        if not isinstance(reply, StatusReply):
            raise ProtocolError(f"received {type(reply).__name__} for a status request")
        return decode_status(reply, frames)


class ScoreCall(Request):
    """Request top-k scores, logprobs of the response tokens, or both; the reply is one message.

    Args:
        message: of `RequestSettings.score`.
        n_vocab: upper bound (exclusive) of the token ids in the reply.
        result: makes the request's result of the checked scores of each sequence.
    """

    def __init__(self, message: RequestMessage, n_vocab: int, result: Callable[[list[Scored]], Any] = list) -> None:
        super().__init__(message)
        assert isinstance(message.header, ScoreRequest), "a message of RequestSettings.score"
        self._sent = message.header
        self._n_vocab = n_vocab
        self._result = result
        self.n_sequences = len(message.sequences)

    def add_units(self) -> bool:
        units = self._message.units
        if units is None or self.with_units:
            return False
        frames = pack_units(units)
        checksums = [checksum(frame) for frame in frames]
        self._sent = msgspec.structs.replace(self._sent, n_mapped=len(units), given_checksums=checksums)
        self.header = self._sent
        self.frames = [requests.encode(self._sent), self.frames[1], *frames]
        self.with_units = True
        return True

    def accept(self, reply: ServerMessage, frames: list[Buffer], now_s: float) -> Any:
        checked = self.check(reply)
        sequences = self._message.sequences
        n_rows = [sequence.n_rows for sequence in sequences]
        names = [f"{name}, from worker {checked.worker!r}" for name in self.names]
        rows = Rows(names, n_rows, [sequence.own for sequence in sequences])
        if checked.signal == "topk":
            table = unpack_topk(checked, frames)
            self._check_table(table, rows)
            return self._result(list(table.split(n_rows)))
        logprobs = unpack_sampled(checked, frames)
        check_logprobs(rows, logprobs)
        return self._result([logprobs[part] for part in row_slices(n_rows)])

    def check(self, reply: ServerMessage) -> ScoreReply:
        """Return the reply, if its header fits the request. Raises ProtocolError."""
        sent = self._sent
        if not isinstance(reply, ScoreReply):
            raise ProtocolError(f"received {type(reply).__name__} for a {sent.signal} request")
        self._check_source(reply)
        received = (reply.signal, reply.n_rows, reply.k, reply.wire, reply.adaptive, reply.with_sampled)
        expected = (sent.signal, sent.n_rows, sent.k, sent.wire, sent.mass > 0, sent.with_sampled)
        if received != expected:
            raise ProtocolError(f"(signal, rows, k, wire, adaptive, with_sampled) are {received}, expected {expected}")
        return reply

    def _check_table(self, table: TopKTable, rows: Rows) -> None:
        """Check the values of all sequences. Raises TeacherError, which names one."""
        given_ids = self._message.given
        sent = self._sent
        check_topk(table, self._n_vocab, rows)
        if table.counts is not None:
            short = (table.counts < sent.k) & (1 - table.tail < sent.mass - MASS_SLACK)
            row = int(short.argmax())
            mass = f"{table.counts[row]} of {sent.k} entries have a mass of {1 - table.tail[row]:.6g}"
            rows.refuse(short, f"{mass}, below the target of {sent.mass:g}")
        if given_ids is not None and listed_problem(given_ids, table.ids):
            for name, part in zip(rows.names, row_slices(rows.n_rows), strict=True):  # which sequence is it?
                if problem := listed_problem(given_ids[part], table.ids[part]):
                    raise TeacherError(f"{name}: {problem}")
        if table.sampled is not None:
            check_logprobs(rows, table.sampled)


class MatrixCall(Request):
    """Request a matrix and assemble it in place: holds one message in addition to it.

    It arrives in row blocks, in order and without gaps. If a worker fails during a stream, another worker starts a new
    stream at row 0. The messages of a stream are numbered. A message lost with a connection therefore shows as a gap,
    and the request is sent again under a new id.

    Args:
        message: of one sequence, or of the LM head.
        shape: (rows, columns) of the matrix.
        result: makes the request's result of the matrix.
        dtype: of the matrix.
    """

    n_sequences = 1
    is_stream = True

    def __init__(
        self,
        message: RequestMessage,
        shape: tuple[int, int],
        result: Callable[[np.ndarray], Any] = np.asarray,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__(message)
        header = message.header
        assert isinstance(header, ScoreRequest | HeadRequest), "a message of RequestSettings"
        self._signal = header.signal if isinstance(header, ScoreRequest) else "head"
        self._wire = header.wire
        self._shape = shape
        self._result = result
        self._dtype = dtype
        self._rows: np.ndarray | None = None
        self._n_sent_before = 0  # under earlier request ids
        self._reset_stream()

    def _reset_stream(self) -> None:
        self._stream_id = b""
        self._worker = ""
        self._ended: set[bytes] = set()  # ids of replaced streams of this request
        self._received_s = 0.0
        self._n_messages = 0  # messages of the current stream
        self._next_row = 0

    def renew_id(self) -> None:
        super().renew_id()
        self._reset_stream()
        self._n_sent_before = self.n_sent

    def needs_new_id(self, now_s: float) -> bool:
        if self._stream_id:
            return now_s - self._received_s >= self.resend_s
        return self.n_sent - self._n_sent_before >= _MAX_SENT

    def accept(self, reply: ServerMessage, frames: list[Buffer], now_s: float) -> Any:
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
        matrix = self._put(message, unpack_rows(message, frames))
        self._n_messages = message.index + 1
        self._next_row = message.stop
        self._received_s = now_s
        self.receipt = Received(request_id=self.request_id, stream_id=message.stream_id, n_messages=self._n_messages)
        return self._result(matrix) if message.stop == message.n_rows else None

    def _check(self, reply: ServerMessage) -> RowsReply:
        if not isinstance(reply, RowsReply):
            raise ProtocolError(f"received {type(reply).__name__} for a {self._signal} request")
        self._check_source(reply)
        received = (reply.signal, reply.n_rows, reply.n_cols)
        expected = (self._signal, *self._shape)
        if received != expected:
            raise ProtocolError(f"(signal, rows, columns) are {received}, expected {expected}")
        if self._wire == "fp16" and reply.dtype == "float32":
            raise ProtocolError("received float32 rows for a request with wire fp16")
        return reply

    def _begin(self, reply: RowsReply) -> None:
        if reply.index:
            raise ProtocolError(f"the first message of a stream has index {reply.index}")
        self._ended.add(self._stream_id)
        self._stream_id = reply.stream_id
        self._worker = reply.worker
        self._n_messages = 0
        self._next_row = 0

    def _put(self, message: RowsReply, rows: np.ndarray) -> np.ndarray:
        """Copy the rows to their place; return the matrix."""
        if self._signal == "logits" and rows.max(1).any():
            raise TeacherError(f"{self.name}, from worker {message.worker!r}: the largest logit of a row is not 0")
        if self._rows is None:
            self._rows = np.empty(self._shape, self._dtype)
        self._rows[message.start : message.stop] = rows
        return self._rows
