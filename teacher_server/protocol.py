"""Protocol v1 between a client (the trainer) and the teacher server: headers, frames, checks.

A message is a list of byte frames, one message per sequence:

    request   [header, token ids int32]
    reply     [header, logprob planes..., id planes...]     each frame <= 4 MiB

The header is `b"GKT" + version, xxh3-64 of the body, msgpack body`. Bulk numbers never enter
msgpack: they travel as raw little-endian frames, which need no copy to send or to forward. The
header carries a checksum of every frame, so a damaged message is an error and never other numbers.

Both sides run the same checks (`Codec.encode` decodes what it wrote), and every way to fail is a
`ProtocolError`. Floor 0: no zmq, no torch.

Letters: P prompt tokens, R response tokens, K top-k entries.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
import numpy as np
import xxhash

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 4 << 20  # frames of 1-4 MiB travel about three times as fast as one of 32 MiB
MAX_HEADER_BYTES = 64 << 10
MAX_TOKENS = MAX_FRAME_BYTES // 4  # so that the int32 token ids of a sequence fit one frame
MAX_ID = (1 << 24) - 1  # the low uint16 and high uint8 planes of fp16 mode hold 24 bits
MAX_K = 1 << 16
MAX_ENTRIES = 1 << 28  # R * K of one reply, 2 GiB in fp32 mode
ID_BYTES = 16  # of request ids and token digests
NO_REQUEST = bytes(ID_BYTES)  # request_id of an error that answers an unreadable request

_MAGIC = b"GKT"
_PREFIX = _MAGIC + bytes([PROTOCOL_VERSION])
_BODY_AT = len(_PREFIX) + 8
_MIN_FP16 = -65504.0

Wire = Literal["fp16", "fp32"]
Buffer = bytes | memoryview
Id = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Checksum = Annotated[int, msgspec.Meta(ge=0)]  # uint64, the largest integer of msgpack
K = Annotated[int, msgspec.Meta(ge=1, le=MAX_K)]
ErrorCode = Literal["busy", "deadline", "damaged", "bad_request", "worker_lost", "engine"]


class ProtocolError(Exception):
    """A message that is not valid protocol v1: damaged, of another version, or out of range."""


def _check_seconds(**values: float) -> None:
    # A NaN passes msgspec's `ge`/`le`, because it compares false with everything.
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} = {value} is not a finite number >= 0")


class Header(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of every header; the subclasses' `tag` says which message it is."""


# Client -> server


class ScoreRequest(Header, tag="score"):
    """Score the response of one sequence; its only frame holds the P + R token ids, int32."""

    request_id: Id  # random, the client's; a resend carries the same one
    signal: Literal["topk"]
    k: K
    temperature: float  # logits are divided by it before they are normalised
    n_vocab: Annotated[int, msgspec.Meta(ge=0, le=MAX_ID + 1)]  # keep ids < n_vocab, then normalise; 0 = all
    prompt_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]  # P
    total_length: Annotated[int, msgspec.Meta(ge=2, le=MAX_TOKENS)]  # P + R
    wire: Wire  # how the reply is packed: 5 bytes an entry, or 8 without loss
    deadline_s: float  # after this long on the server nobody waits for the answer any more
    checksum: Checksum  # of the token frame

    def __post_init__(self) -> None:
        _check_seconds(deadline_s=self.deadline_s, temperature=self.temperature)
        if not 1e-4 <= self.temperature <= 1e4:
            raise ValueError(f"temperature = {self.temperature} is not in [1e-4, 1e4]")
        if self.prompt_length >= self.total_length:
            raise ValueError(f"no response: prompt_length {self.prompt_length} >= total_length {self.total_length}")
        if 0 < self.n_vocab < self.k:
            raise ValueError(f"k = {self.k} is more than n_vocab = {self.n_vocab}")
        if self.n_response * self.k > MAX_ENTRIES:
            raise ValueError(f"{self.n_response} rows x k = {self.k} is more than {MAX_ENTRIES} entries")

    @property
    def n_response(self) -> int:
        return self.total_length - self.prompt_length


class InfoRequest(Header, tag="info_request"):
    """Which model answers here, and with what limits?"""

    request_id: Id


class Ping(Header, tag="ping"):
    """Are you alive, and still the same server process?"""


# Server -> client


class TopKReply(Header, tag="topk"):
    """Scores of one sequence; the frames hold [R, K] logprobs and ids, see `pack_topk`."""

    request_id: Id
    token_digest: Id  # xxh3-128 of the token ids, computed by the worker from what it scored
    model_fingerprint: Text
    n_rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]  # R; row j predicts response token j
    k: K
    wire: Wire
    checksums: Annotated[list[Checksum], msgspec.Meta(max_length=4096)]  # one per frame
    queue_s: float  # from arrival at the broker to the start of the forward pass
    compute_s: float  # of the whole batch this sequence was scored in

    def __post_init__(self) -> None:
        _check_seconds(queue_s=self.queue_s, compute_s=self.compute_s)
        if self.n_rows * self.k > MAX_ENTRIES:
            raise ValueError(f"{self.n_rows} rows x k = {self.k} is more than {MAX_ENTRIES} entries")


class ErrorReply(Header, tag="error"):
    """No scores. After `busy`, `deadline` and `damaged` ask again; the others are final."""

    request_id: Id
    code: ErrorCode
    text: Text
    retry_after_s: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(retry_after_s=self.retry_after_s)


class InfoReply(Header, tag="info"):
    """What is being served. `tokenizer_fingerprint` is empty if the model folder holds no tokenizer."""

    request_id: Id
    protocol_version: Count
    model_name: Text
    model_path: Text
    model_fingerprint: Text
    tokenizer_fingerprint: Text
    vocab_size: Count  # rows of the LM head, which may be more than the tokenizer has tokens
    max_tokens: Count  # longest P + R
    n_workers: Count
    engine: Text
    device: Text


class Pong(Header, tag="pong"):
    """Alive. A new `epoch` means a restarted server, which has forgotten every earlier request."""

    epoch: Id
    n_workers: Count
    n_queued: Count


ClientMessage = ScoreRequest | InfoRequest | Ping
ServerMessage = TopKReply | ErrorReply | InfoReply | Pong
M = TypeVar("M")


class Codec(Generic[M]):
    """Header <-> bytes for one closed set of messages; decodes nothing outside the set."""

    def __init__(self, messages: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, header: M) -> bytes:
        """Header frame. Raises ProtocolError for values the other side would refuse."""
        try:
            body = self._encoder.encode(header)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"cannot encode {type(header).__name__}: {error}") from error
        frame = _PREFIX + checksum(body).to_bytes(8, "little") + body
        self.decode(frame)
        return frame

    def decode(self, frame: Buffer) -> M:
        """Header. Raises ProtocolError on damage, another version, unknown fields, bad ranges."""
        frame = memoryview(frame)
        if not _BODY_AT < frame.nbytes <= MAX_HEADER_BYTES:
            raise ProtocolError(f"header of {frame.nbytes} bytes, expected {_BODY_AT + 1} to {MAX_HEADER_BYTES}")
        if frame[:3] != _MAGIC:
            raise ProtocolError("not a teacher protocol message (bad magic): is another service on this port?")
        if frame[3] != PROTOCOL_VERSION:
            raise ProtocolError(f"the peer speaks protocol {frame[3]}, this side {PROTOCOL_VERSION}: upgrade one")
        body = frame[_BODY_AT:]
        if checksum(body) != int.from_bytes(frame[4:_BODY_AT], "little"):
            raise ProtocolError("header checksum does not match")
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, OverflowError, RecursionError) as error:
            # msgspec lets a bare UnicodeDecodeError through on bad UTF-8.
            raise ProtocolError(f"header refused: {error}") from error


requests: Codec[ClientMessage] = Codec(ClientMessage)
replies: Codec[ServerMessage] = Codec(ServerMessage)


def as_frame(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array, not copied."""
    return array.data.cast("B")


def checksum(data: Buffer) -> int:
    """xxh3-64 of one contiguous frame; finds damage, not malice."""
    return xxhash.xxh3_64_intdigest(data)


def token_digest(token_ids: np.ndarray) -> bytes:
    """xxh3-128 of the int32 token ids, 16 bytes: proves which sequence a reply is about."""
    return xxhash.xxh3_128_digest(as_frame(np.ascontiguousarray(token_ids, dtype="<i4")))


def tokenizer_fingerprint(vocab: Mapping[str, int]) -> str:
    """sha256 over the sorted (id, token) pairs, hex: equal exactly if the two vocabularies are."""
    digest = hashlib.sha256()
    for token_id, token in sorted((token_id, token) for token, token_id in vocab.items()):
        raw = token.encode("utf-8", "surrogatepass")
        digest.update(f"{token_id}:{len(raw)}:".encode() + raw)
    return digest.hexdigest()


def check_tokens(token_ids: np.ndarray) -> np.ndarray:
    """[P + R] contiguous little-endian int32. Raises ProtocolError on ids outside [0, 2^24)."""
    if token_ids.ndim != 1 or not 2 <= token_ids.size <= MAX_TOKENS:
        raise ProtocolError(f"token ids of shape {token_ids.shape}, expected one row of 2 to {MAX_TOKENS}")
    if token_ids.min() < 0 or token_ids.max() > MAX_ID:
        raise ProtocolError(f"token ids {token_ids.min()} to {token_ids.max()} leave [0, {MAX_ID}]")
    return np.ascontiguousarray(token_ids, dtype="<i4")


def unpack_tokens(request: ScoreRequest, frames: Sequence[Buffer]) -> np.ndarray:
    """[P + R] int32, a read-only view of the frame. Raises ProtocolError if it is not what the header says."""
    if len(frames) != 1 or memoryview(frames[0]).nbytes != 4 * request.total_length:
        raise ProtocolError(f"expected one frame of {request.total_length} token ids")
    if checksum(frames[0]) != request.checksum:
        raise ProtocolError("token frame checksum does not match")
    return check_tokens(np.frombuffer(frames[0], dtype="<i4"))


_PLANES: dict[Wire, tuple[tuple[str, str], ...]] = {
    "fp16": (("logprobs", "<f2"), ("low", "<u2"), ("high", "u1")),
    "fp32": (("logprobs", "<f4"), ("ids", "<i4")),
}


def _frame_plan(n_rows: int, k: int, wire: Wire) -> Iterator[tuple[str, str, int, int]]:
    """(plane, dtype, first row, end row) of each frame, in order; the same on both sides."""
    for plane, dtype in _PLANES[wire]:
        rows = MAX_FRAME_BYTES // (k * np.dtype(dtype).itemsize)
        for start in range(0, n_rows, rows):
            yield plane, dtype, start, min(start + rows, n_rows)


def pack_topk(topk_ids: np.ndarray, topk_logprobs: np.ndarray, wire: Wire) -> list[memoryview]:
    """[R, K] ids and logprobs (nats) -> frames; what to list in `TopKReply.checksums`, in order.

    fp16: logprobs as float16 (KL error 8e-5 on average), ids as a uint16 and a uint8 plane, 5 bytes
    an entry. fp32: float32 and int32, 8 bytes, exact. Raises ProtocolError on bad shapes or ids.
    """
    if topk_ids.ndim != 2 or topk_ids.shape != topk_logprobs.shape or topk_ids.size == 0:
        raise ProtocolError(f"ids {topk_ids.shape} and logprobs {topk_logprobs.shape} must be the same [R, K]")
    if topk_ids.min() < 0 or topk_ids.max() > MAX_ID:
        raise ProtocolError(f"top-k ids {topk_ids.min()} to {topk_ids.max()} leave [0, {MAX_ID}]")
    if wire == "fp16":
        # Below float16's range exp() is zero anyway; without the clip the cast would give -inf.
        logprobs = np.maximum(topk_logprobs, _MIN_FP16)
        planes = {"logprobs": logprobs, "low": topk_ids & 0xFFFF, "high": topk_ids >> 16}
    else:
        planes = {"logprobs": topk_logprobs, "ids": topk_ids}
    return [
        as_frame(np.ascontiguousarray(planes[plane][start:stop], dtype=dtype))
        for plane, dtype, start, stop in _frame_plan(topk_ids.shape[0], topk_ids.shape[1], wire)
    ]


def unpack_topk(reply: TopKReply, frames: Sequence[Buffer]) -> tuple[np.ndarray, np.ndarray]:
    """([R, K] int32 ids, [R, K] float32 logprobs), own memory. Raises ProtocolError on any damage."""
    plan = list(_frame_plan(reply.n_rows, reply.k, reply.wire))
    if not len(frames) == len(reply.checksums) == len(plan):
        raise ProtocolError(f"{len(frames)} frames, {len(reply.checksums)} checksums, expected {len(plan)}")
    sizes = [(stop - start) * reply.k * np.dtype(dtype).itemsize for _, dtype, start, stop in plan]
    if [memoryview(frame).nbytes for frame in frames] != sizes:  # before anything is allocated
        raise ProtocolError(f"a frame is not of its size; expected {sizes}")
    ids = np.zeros((reply.n_rows, reply.k), np.int32)
    logprobs = np.empty((reply.n_rows, reply.k), np.float32)
    for (plane, dtype, start, stop), frame, expected in zip(plan, frames, reply.checksums, strict=True):
        if checksum(frame) != expected:
            raise ProtocolError(f"checksum of the {plane} frame of rows {start}:{stop} does not match")
        part = np.frombuffer(frame, dtype).reshape(stop - start, reply.k)
        if plane == "logprobs":
            logprobs[start:stop] = part
        elif plane == "high":
            ids[start:stop] |= part.astype(np.int32) << 16
        else:
            ids[start:stop] |= part
    return ids, logprobs
