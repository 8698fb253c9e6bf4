"""Encode and decode the header frame of a message: `b"GKT" + version, xxh3-64 of the body, msgpack body`.

The messages are in `teacher_server.wire.protocol` and `teacher_server.wire.worker_protocol`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
import xxhash

# 2: given ids, sampled token with the top-k; 3: several sequences in a request; 4: templates, rows of own tokens only
PROTOCOL_VERSION = 4
MAX_HEADER_BYTES = 64 << 10

_MAGIC = b"GKT"
BODY_AT = len(_MAGIC) + 1 + 8

Buffer = bytes | memoryview


class ProtocolError(Exception):
    """A message is not valid: damaged, of an unknown version, or out of range."""


class Header(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base class of the headers. The `tag` of a subclass is its message type."""

    @property
    def version(self) -> int:
        """Return the lowest protocol version that has its fields."""
        return 1


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
        frame = seal(body, header.version)
        self.decode(frame)
        return frame

    def decode(self, frame: Buffer) -> M:
        """Return the header. Raises ProtocolError on damage, another version, unknown fields, or bad ranges."""
        frame = memoryview(frame)
        if not BODY_AT < frame.nbytes <= MAX_HEADER_BYTES:
            raise ProtocolError(f"header of {frame.nbytes} bytes, expected {BODY_AT + 1} to {MAX_HEADER_BYTES}")
        if frame[:3] != _MAGIC:
            begin = bytes(frame[:3])
            raise ProtocolError(
                f"not a teacher protocol message: it begins with {begin!r}. Is another service on this port?"
            )
        version = frame[3]
        if not 1 <= version <= PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol version {version} of the peer, this side has {PROTOCOL_VERSION}: upgrade one"
            )
        body = frame[BODY_AT:]
        if checksum(body) != int.from_bytes(frame[4:BODY_AT], "little"):
            raise ProtocolError("header checksum does not match")
        try:
            header = self._decoder.decode(body)
        except REFUSALS as error:
            raise ProtocolError(f"header refused: {error}") from error
        if header.version > version:
            raise ProtocolError(f"a header of version {version} with fields of version {header.version}")
        return header


def seal(body: bytes, version: int) -> bytes:
    """Return a header frame: magic, version, checksum, body."""
    return _MAGIC + bytes([version]) + checksum(body).to_bytes(8, "little") + body


def checksum(data: Buffer) -> int:
    """Return xxh3-64 of one contiguous frame. It detects damage, not malicious changes."""
    return xxhash.xxh3_64_intdigest(data)
