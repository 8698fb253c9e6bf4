"""Protocol between a client (the trainer) and the teacher server: all headers and their codec.

A message is a list of byte frames. The first is the header, `b"GKT" + version, xxh3-64 of the body,
msgpack body`. The others are raw little-endian arrays of at most 4 MiB each, described in
`teacher_server.wire.payload`, which are sent and forwarded without a copy. The header contains a checksum
of every frame, so a damaged message is an error and never gives wrong numbers.

    client -> server                         server -> client
    ScoreRequest  [header, token ids, ...]   ScoreReply  [header, planes...]     topk, sampled: one message
                                             RowsReply   [header, rows] ...      logits, hidden: a stream,
    HeadRequest   [header]                                                       and the LM head
    GenerateRequest [header, token ids]      GenerateReply [header, token ids]   answers that the teacher writes
    Received      [header]                   (continues the stream)
    Cancel        [header]
    InfoRequest   [header]                   InfoReply   [header]
    StatusRequest [header]                   StatusReply [header, msgpack]
    DrainRequest  [header]                   DrainReply  [header]
    Ping          [header]                   Pong        [header]
                                             ErrorReply  [header]                to any request

Both sides run the same checks (`Codec.encode` decodes its own output), and every failure is a
`ProtocolError`. This module imports neither zmq nor torch. A peer of another version is refused.

Letters: P prompt tokens, R response tokens, M of them have rows, K top-k entries, V vocabulary, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
import numpy as np
import xxhash

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 64 << 10

_MAGIC = b"GKT"
BODY_AT = len(_MAGIC) + 1 + 8

Buffer = bytes | memoryview


class ProtocolError(Exception):
    """A message is not valid: damaged, of an unknown version, or out of range."""


class Header(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base class of the headers. The `tag` of a subclass is its message type."""


M = TypeVar("M", bound=Header)

# Exceptions that msgspec may raise on hostile bytes; bad UTF-8 raises a plain UnicodeDecodeError.
REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError, ValueError, OverflowError, RecursionError)


class Codec(Generic[M]):
    """Encode and decode headers of one closed set of messages."""

    def __init__(self, messages: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, header: M) -> bytes:
        """Return the header frame. Raises ProtocolError for values that the other side would refuse."""
        try:
            body = self._encoder.encode(header)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"cannot encode {type(header).__name__}: {error}") from error
        frame = seal(body)
        self.decode(frame)
        return frame

    def decode(self, frame: Buffer) -> M:
        """Return the header. Raises ProtocolError on damage, another version, unknown fields, or bad ranges."""
        frame = memoryview(frame)
        if not BODY_AT < frame.nbytes <= MAX_HEADER_BYTES:
            raise ProtocolError(f"header of {frame.nbytes} bytes, expected {BODY_AT + 1} to {MAX_HEADER_BYTES}")
        if frame[:3] != _MAGIC:
            problem = f"not a teacher protocol message: it begins with {bytes(frame[:3])!r}"
            raise ProtocolError(f"{problem}. Is another service on this port?")
        if frame[3] != PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol version {frame[3]} of the peer, this side has {PROTOCOL_VERSION}: upgrade one"
            )
        body = frame[BODY_AT:]
        if checksum(body) != int.from_bytes(frame[4:BODY_AT], "little"):
            raise ProtocolError("header checksum does not match")
        try:
            return self._decoder.decode(body)
        except REFUSALS as error:
            raise ProtocolError(f"header refused: {error}") from error


def seal(body: bytes) -> bytes:
    """Return a header frame: magic, version, checksum, body."""
    return _MAGIC + bytes([PROTOCOL_VERSION]) + checksum(body).to_bytes(8, "little") + body


def checksum(data: Buffer) -> int:
    """Return xxh3-64 of one contiguous frame. It detects damage, not malicious changes."""
    return xxhash.xxh3_64_intdigest(data)


MAX_FRAME_BYTES = 4 << 20  # frames of 1-4 MiB travel about three times as fast as one of 32 MiB
MAX_TOKENS = MAX_FRAME_BYTES // 4  # the int32 token ids of a sequence must fit into one frame
MAX_ID = (1 << 24) - 1  # the low uint16 and high uint8 planes of fp16 mode hold 24 bits
MAX_K = 1 << 16
MAX_ENTRIES = 1 << 25  # R * K of one reply: 160 MiB in fp16 mode, 256 MiB in fp32 mode
MAX_FRAMES = 256  # most frames of one message
MAX_SEQUENCES = 256  # most sequences of one request
MAX_IMAGES = 64  # most distinct images of one request
MAX_IMAGE_BYTES = 16 << 20  # longest encoded image
MAX_IMAGES_BYTES = 64 << 20  # most bytes of the distinct encoded images of one request
MAX_TEXT = 4096  # characters of a `Text`
ID_BYTES = 16  # bytes of a request id or a token digest
NO_REQUEST = bytes(ID_BYTES)  # request_id of an error about an unreadable request
STREAM_WINDOW = 8  # messages of a stream that may be sent before they are confirmed by `Received`; 32 MiB

Signal = Literal["topk", "sampled", "logits", "hidden"]
Wire = Literal["fp16", "fp32"]  # compact (2 bytes a number), or with the engine's precision
RowDtype = Literal["float16", "bfloat16", "float32"]
ErrorCode = Literal["busy", "draining", "deadline", "damaged", "bad_request", "worker_lost", "engine", "units"]
Id = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Rows = Annotated[int, msgspec.Meta(ge=1, le=MAX_ID + 1)]
Checksum = Annotated[int, msgspec.Meta(ge=0)]  # uint64, the largest integer of msgpack
Checksums = Annotated[list[Checksum], msgspec.Meta(max_length=MAX_FRAMES)]  # one per frame after the header
Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
ImageSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_BYTES)]
ImageIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_IMAGES)]
Probe = Annotated[list[float], msgspec.Meta(max_length=256)]
Lengths = Annotated[list[tuple[Length, Length]], msgspec.Meta(max_length=MAX_SEQUENCES)]


def check_seconds(**values: float) -> None:
    """Raise ValueError, which the codec converts to ProtocolError, unless all values are finite and >= 0."""
    # A NaN passes msgspec's `ge`/`le`, because every comparison with it is false.
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} = {value} is not a finite number >= 0")


# Client -> server


class ScoreRequest(Header, tag="score", kw_only=True, omit_defaults=True):
    """Score the responses of one or several sequences. The first frame holds the P + R token ids of one sequence after
    the other, int32; given ids or a map of units may follow. The reply has the rows of one sequence after the other:
    one for each response token, or with `n_own` > 0 for M of them; the frame has the others as bitwise complements
    (`mark_own`).

    signal: values returned for each of the M positions that predict a token with a row
        topk     the K most probable ids, their logprobs, and the total probability of all other ids; with
                 `mass` > 0 only the entries needed to reach that mass, at most K; with `n_given` > 0 the K
                 entries are the given ids of the row and the most probable others; with `units` the entries are
                 units, sets of tokens that the client has chosen, with the logprobs of their sums
        sampled  the logprob of the response token
        logits   all V logits / temperature, each row shifted so that its maximum is 0
        hidden   the H final hidden states; multiply by the matrix of `HeadRequest` for the logits
    """

    request_id: Id  # random, chosen by the client; a resend has the same id
    signal: Signal
    teacher: Name = ""  # name of a teacher of the server; may be empty if there is only one
    k: Annotated[int, msgspec.Meta(ge=0, le=MAX_K)] = 0  # topk: number of entries of a row
    mass: float = 0.0  # topk: total probability that a row's entries reach; 0 = always K entries
    temperature: float = 1.0  # logits are divided by it before normalization
    n_vocab: Annotated[int, msgspec.Meta(ge=0, le=MAX_ID + 1)] = 0  # keep ids < n_vocab, then normalize; 0 = all
    prompt_length: Length  # P; of several sequences the sum
    total_length: Annotated[int, msgspec.Meta(ge=2, le=MAX_TOKENS)]  # P + R; of several sequences the sum
    wire: Wire
    deadline_s: float  # the server drops the request after this time
    checksum: Checksum  # checksum of the token frame
    n_given: Annotated[int, msgspec.Meta(ge=0, le=MAX_K)] = 0  # topk: given ids per row, see `pack_given`
    given_checksums: Checksums = []  # one checksum for each frame of given ids, or of the map of units
    with_sampled: bool = False  # topk: return the logprob of the response token, too
    lengths: Lengths = []  # P and P + R of each, if there are several sequences; only for topk and sampled
    n_own: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] = 0  # M, of several sequences the sum; 0 = R
    # topk: digest of the map from token to unit, of which there are `n_vocab`. A worker that does not know it replies
    # with the error `units`, and the client sends the request again with the map.
    units: Annotated[bytes, msgspec.Meta(max_length=ID_BYTES)] = b""
    n_mapped: Annotated[int, msgspec.Meta(ge=0, le=MAX_ID + 1)] = 0  # tokens of the map in this message; 0 = without it
    # Bytes of each distinct encoded image; they follow the other frames, with their checksums in `given_checksums`.
    image_sizes: Annotated[list[ImageSize], msgspec.Meta(max_length=MAX_IMAGES)] = []
    # For each sequence the images whose tokens it has, in order. The ids have all tokens of an image.
    image_indices: Annotated[list[list[ImageIndex]], msgspec.Meta(max_length=MAX_SEQUENCES)] = []

    def __post_init__(self) -> None:
        check_seconds(deadline_s=self.deadline_s, temperature=self.temperature, mass=self.mass)
        if not 1e-4 <= self.temperature <= 1e4:
            raise ValueError(f"temperature = {self.temperature} is not in [1e-4, 1e4]")
        if self.prompt_length >= self.total_length:
            raise ValueError(f"no response: prompt_length {self.prompt_length} >= total_length {self.total_length}")
        if (self.k > 0) != (self.signal == "topk"):
            raise ValueError(f"k = {self.k} with signal {self.signal}: must be >= 1 for topk, 0 for others")
        if self.mass > 1 or (self.mass > 0 and self.signal != "topk"):
            raise ValueError(f"mass = {self.mass} with signal {self.signal}: must be in [0, 1] for topk, 0 for others")
        if self.units and (len(self.units) < ID_BYTES or self.signal != "topk" or self.n_given or not self.n_vocab):
            raise ValueError("units need a whole digest, signal topk and n_vocab, and no given ids")
        if self.n_mapped and not self.units:
            raise ValueError("a map of units without its digest")
        if 0 < self.n_vocab < self.k:
            raise ValueError(f"k = {self.k} is more than n_vocab = {self.n_vocab}")
        if self.n_given > self.k or (self.n_given and self.mass):
            raise ValueError(
                f"n_given = {self.n_given} with k = {self.k} and mass = {self.mass}: at most k, without mass"
            )
        if self.with_sampled and self.signal != "topk":
            raise ValueError(f"with_sampled with signal {self.signal}: only topk has it")
        if self.lengths:
            self._check_lengths()
        if self.n_own and not len(self.sequences) <= self.n_own < self.n_response:
            raise ValueError(f"n_own = {self.n_own} of {self.n_response} response tokens: must be fewer, or 0 for all")
        n_images = len(self.image_sizes)
        used = {index for images in self.image_indices for index in images}
        if (n_images and len(self.image_indices) != len(self.sequences)) or used != {*range(n_images)}:
            raise ValueError(f"{n_images} images, and lists of {len(self.image_indices)} sequences use {used}")
        if sum(self.image_sizes) > MAX_IMAGES_BYTES:
            raise ValueError(f"{sum(self.image_sizes)} bytes of images: more than {MAX_IMAGES_BYTES}")
        if self.n_rows * self.k > MAX_ENTRIES:
            raise ValueError(f"{self.n_rows} rows x k = {self.k} is more than {MAX_ENTRIES} entries")

    def _check_lengths(self) -> None:
        if len(self.lengths) == 1 or self.signal not in ("topk", "sampled"):
            raise ValueError(f"lengths of {len(self.lengths)} sequences with signal {self.signal}")
        if any(prompt >= total for prompt, total in self.lengths):
            raise ValueError("a sequence has no response")
        sums = tuple(map(sum, zip(*self.lengths, strict=True)))
        if sums != (self.prompt_length, self.total_length):
            raise ValueError(f"lengths add up to {sums}, expected {(self.prompt_length, self.total_length)}")

    @property
    def n_response(self) -> int:
        return self.total_length - self.prompt_length

    @property
    def n_rows(self) -> int:
        """Return M, the rows of the reply."""
        return self.n_own or self.n_response

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Return (P, P + R) of each sequence."""
        return self.lengths or [(self.prompt_length, self.total_length)]


class HeadRequest(Header, tag="head_request", kw_only=True):
    """Request the LM head, [V, H], as a stream. With the `hidden` signal it gives the exact distribution."""

    request_id: Id
    teacher: Name = ""
    wire: Wire
    deadline_s: float

    def __post_init__(self) -> None:
        check_seconds(deadline_s=self.deadline_s)


class GenerateRequest(Header, tag="generate"):
    """Write `n` answers to each prompt. The frame holds the token ids of one prompt after the other, int32."""

    request_id: Id
    teacher: Name
    lengths: Annotated[list[Length], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)]  # tokens of each prompt
    seeds: Annotated[list[Count], msgspec.Meta(max_length=MAX_SEQUENCES)]  # one for each prompt
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)]
    temperature: float  # 0: the most probable token
    top_p: float
    max_tokens: Length  # limit of an answer, with the id that ends it
    n_vocab: Rows  # only ids below it are written
    stop_ids: Annotated[list[Count], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)]  # each ends an answer
    deadline_s: float
    checksum: Checksum  # checksum of the frame

    def __post_init__(self) -> None:
        check_seconds(deadline_s=self.deadline_s, temperature=self.temperature, top_p=self.top_p)
        if len(self.seeds) != len(self.lengths) or not 0 < self.top_p <= 1:
            raise ValueError(f"{len(self.seeds)} seeds for {len(self.lengths)} prompts, top_p = {self.top_p}")
        if max(sum(self.lengths), len(self.lengths) * self.n * self.max_tokens) > MAX_TOKENS:
            raise ValueError(f"its prompts, or its answers, may have more than {MAX_TOKENS} tokens together")


class Received(Header, tag="received"):
    """`n_messages` of the stream `stream_id` have arrived; up to `STREAM_WINDOW` more may be sent."""

    request_id: Id
    stream_id: Id
    n_messages: Count


class Cancel(Header, tag="cancel"):
    """Drop a request. There is no reply."""

    request_id: Id


class InfoRequest(Header, tag="info_request", omit_defaults=True):
    """Request the description of a teacher: model and limits."""

    request_id: Id
    teacher: Name = ""


class StatusRequest(Header, tag="status_request"):
    """Request the status: workers, GPUs, queues and times."""

    request_id: Id


class DrainRequest(Header, tag="drain_request"):
    """Drain one worker by its name, or the whole server (empty name): finish admitted requests, then exit."""

    request_id: Id
    worker: Name = ""


class Ping(Header, tag="ping"):
    """Heartbeat request. The reply identifies the server process."""


# Server -> client


class ScoreReply(Header, tag="scores", kw_only=True, omit_defaults=True):
    """Complete reply for `topk` or `sampled`, all sequences. `payload.score_planes` describes the frames."""

    request_id: Id
    token_digest: Id  # xxh3-128 of the token ids that the worker has scored
    model_fingerprint: Name
    worker: Name
    signal: Literal["topk", "sampled"]
    n_rows: Length  # M; row j predicts the response token j, of those that have rows
    k: Annotated[int, msgspec.Meta(ge=0, le=MAX_K)] = 0
    n_entries: Annotated[int, msgspec.Meta(ge=0, le=MAX_ENTRIES)] = 0  # M * K, or fewer with a mass target
    adaptive: bool = False  # each row has its own count of entries
    wire: Wire
    checksums: Checksums
    queue_s: float  # time from arrival at the broker to the start of the forward pass
    compute_s: float  # time from the start of the first sequence's batch to the end of the last one's
    with_sampled: bool = False  # the request's value

    def __post_init__(self) -> None:
        check_seconds(queue_s=self.queue_s, compute_s=self.compute_s)
        most = self.n_rows * self.k
        if (self.k > 0) != (self.signal == "topk") or ((self.adaptive or self.with_sampled) and self.k == 0):
            raise ValueError(f"k = {self.k}, adaptive = {self.adaptive} with signal {self.signal}")
        if not (min(self.n_rows, most) if self.adaptive else most) <= self.n_entries <= min(most, MAX_ENTRIES):
            raise ValueError(f"{self.n_entries} entries in {self.n_rows} rows of k = {self.k}")


class RowsReply(Header, tag="rows"):
    """Rows [start, stop) of a matrix, in one frame. The message with stop == n_rows is the last."""

    request_id: Id
    token_digest: Id  # digest of the token ids, as in ScoreReply; zeros for the LM head
    model_fingerprint: Name
    worker: Name
    stream_id: Id  # new after a retry, which starts at row 0 again
    signal: Literal["logits", "hidden", "head"]
    index: Count  # number of this message in its stream
    start: Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
    stop: Rows
    n_rows: Rows
    n_cols: Rows
    dtype: RowDtype
    checksums: Checksums
    queue_s: float
    compute_s: float

    def __post_init__(self) -> None:
        check_seconds(queue_s=self.queue_s, compute_s=self.compute_s)
        if not self.start < self.stop <= self.n_rows:
            raise ValueError(f"rows {self.start} to {self.stop} of {self.n_rows}")


class GenerateReply(Header, tag="answers"):
    """The answers to a `GenerateRequest`: all of one prompt after the other. The frame holds their ids, int32."""

    request_id: Id
    token_digest: Id  # digest of the prompts
    model_fingerprint: Name
    worker: Name
    lengths: Annotated[list[Length], msgspec.Meta(min_length=1, max_length=MAX_TOKENS)]
    checksum: Checksum
    queue_s: float
    compute_s: float

    def __post_init__(self) -> None:
        check_seconds(queue_s=self.queue_s, compute_s=self.compute_s)


class ErrorReply(Header, tag="error", omit_defaults=True):
    """The request failed. Send it again after busy, draining, deadline, damaged, and units; other codes are final."""

    request_id: Id
    code: ErrorCode
    text: Text
    retry_after_s: float = 0.0
    sequence: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCES)] = 0  # index of the one that failed, if one did

    def __post_init__(self) -> None:
        check_seconds(retry_after_s=self.retry_after_s)


class ModelHeader(Header, kw_only=True):
    """Description of a teacher's model. Fingerprints are empty if its folder has no tokenizer or no chat template."""

    teacher: Name
    model_name: Name
    model_path: Text
    model_fingerprint: Name
    tokenizer_fingerprint: Name
    vocab_size: Count  # rows of the LM head, which may be more than the tokenizer has tokens
    hidden_size: Count
    max_tokens: Count  # longest P + R
    n_streams: Count  # sequences in flight that keep its worker busy, or all of them
    engine: Name
    device: Name
    dtype: Name
    template_fingerprint: Name = ""
    template_example: Text = ""  # see `fingerprint.template_example`; empty: unknown, or longer than a `Text`
    image_probe: Probe = []  # see `vision.processor.ImageProcessor.probe`; empty: it takes no images


class InfoReply(ModelHeader, tag="info", kw_only=True, omit_defaults=True):
    """Description of a teacher."""

    request_id: Id
    n_workers: Count


class StatusReply(Header, tag="status"):
    """The frame is a `status.ServerStatus`."""

    request_id: Id
    checksums: Checksums


class DrainReply(Header, tag="drain"):
    """New requests are refused; `n_left` admitted requests are unfinished."""

    request_id: Id
    n_left: Count


class Pong(Header, tag="pong"):
    """Heartbeat reply. A new `epoch` means a restarted server, which has lost every earlier request."""

    epoch: Id
    n_workers: Count
    n_queued: Count
    draining: bool = False


Work = ScoreRequest | HeadRequest | GenerateRequest
ClientMessage = Work | Received | Cancel | InfoRequest | StatusRequest | DrainRequest | Ping
ServerMessage = ScoreReply | RowsReply | GenerateReply | ErrorReply | InfoReply | StatusReply | DrainReply | Pong
requests: Codec[ClientMessage] = Codec(ClientMessage)
replies: Codec[ServerMessage] = Codec(ServerMessage)


def as_frame(array: np.ndarray) -> memoryview:
    """Return the bytes of a C-contiguous array without a copy."""
    return array.data.cast("B")


def image_digest(data: Buffer) -> bytes:
    """Return the xxh3-128 (16 bytes) of encoded bytes, by which processes know an image."""
    return xxhash.xxh3_128_digest(data)


def token_digest(token_ids: Buffer | np.ndarray, images: Iterable[bytes] = ()) -> bytes:
    """Return xxh3-128 (16 bytes) of the int32 token ids or of their frame. It ties a reply to its sequence.

    Args:
        images: digests of the sequences' images, in order; two images of one size have the same tokens.
    """
    if isinstance(token_ids, np.ndarray):
        token_ids = as_frame(np.ascontiguousarray(token_ids, dtype="<i4"))
    digest = xxhash.xxh3_128(token_ids)
    for image in images:
        digest.update(image)
    return digest.digest()
