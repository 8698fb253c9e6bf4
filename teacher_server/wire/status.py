"""What a server tells about itself: the frame of a `StatusReply`, and the rows of the status table."""

from __future__ import annotations

from typing import Literal

import msgspec

from teacher_server.wire.protocol import REFUSALS, Buffer, ProtocolError, StatusReply, checksum, replies


class Gpu(msgspec.Struct, forbid_unknown_fields=True):
    """One device of a worker; `uuid` and `name` are empty where no driver says them."""

    id: str  # as in CUDA_VISIBLE_DEVICES
    uuid: str = ""
    name: str = ""


class WorkerStatus(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    teacher: str
    state: Literal["ready", "draining"]
    host: str
    pid: int
    engine: str
    device: str
    dtype: str
    gpus: list[Gpu]
    n_in_flight: int
    tokens_in_flight: int
    n_done: int
    n_tokens: int  # scored since it joined
    tokens_per_s: float  # over the last ten seconds or so
    queue_s: float  # mean of the last hundred answers or so
    compute_s: float
    last_heard_s: float  # ago
    cuda_visible_devices: str | None = None  # None = unset, or a server that does not tell


class TeacherStatus(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    model_name: str
    model_path: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    n_queued: int
    n_workers: int


class ServerStatus(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What `python -m teacher_server status` shows. Counters run from the server's start."""

    epoch: str
    uptime_s: float
    draining: bool
    n_queued: int
    queued_bytes: int
    n_answered: int
    n_errors: dict[str, int]  # by ErrorCode
    n_retried: int  # requests given to another worker
    n_lost_workers: int
    excluded: dict[str, str]  # workers that sent bad data, and what it was
    teachers: list[TeacherStatus]
    workers: list[WorkerStatus]


_decoder = msgspec.msgpack.Decoder(ServerStatus)


def encode_status(request_id: bytes, status: ServerStatus) -> list[bytes]:
    """[header, frame] of a StatusReply."""
    frame = msgspec.msgpack.encode(status)
    return [replies.encode(StatusReply(request_id=request_id, checksums=[checksum(frame)])), frame]


def decode_status(reply: StatusReply, frames: list[Buffer]) -> ServerStatus:
    """Raises ProtocolError if the frame is damaged or not a ServerStatus."""
    if [checksum(frame) for frame in frames] != reply.checksums or len(frames) != 1:
        raise ProtocolError("the status frame is missing or damaged")
    try:
        return _decoder.decode(frames[0])
    except REFUSALS as error:
        raise ProtocolError(f"status refused: {error}") from error
