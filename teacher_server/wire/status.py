"""Status of a server: the frame of a `StatusReply`, and the source of the status table."""

from __future__ import annotations

from typing import Literal

import msgspec

from teacher_server.wire.protocol import REFUSALS, Buffer, ProtocolError, StatusReply, checksum, replies


class Gpu(msgspec.Struct, forbid_unknown_fields=True):
    """One device of a worker. `uuid` and `name` are empty if the driver does not report them."""

    id: str  # CUDA_VISIBLE_DEVICES syntax
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
    tokens_per_s: float  # over about the last ten seconds
    queue_s: float  # mean over about the last hundred requests
    compute_s: float
    last_heard_s: float  # time since the last heartbeat
    cuda_visible_devices: str | None = None  # None = unset, or not reported


class TeacherStatus(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    model_name: str
    model_path: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    n_queued: int
    n_workers: int


class ServerStatus(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Content of `gkd teacher status`. Counters start with the server."""

    epoch: str
    uptime_s: float
    draining: bool
    n_queued: int
    queued_bytes: int
    n_answered: int
    n_errors: dict[str, int]  # ErrorCode -> number of errors
    n_retried: int  # requests assigned again
    n_lost_workers: int
    excluded: dict[str, str]  # name -> reason, of workers that sent bad data
    teachers: list[TeacherStatus]
    workers: list[WorkerStatus]


def encode_status(request_id: bytes, status: ServerStatus) -> list[bytes]:
    """Return [header, frame] of a StatusReply."""
    frame = msgspec.msgpack.encode(status)
    return [replies.encode(StatusReply(request_id=request_id, checksums=[checksum(frame)])), frame]


def decode_status(reply: StatusReply, frames: list[Buffer]) -> ServerStatus:
    """Decode the status. Raises ProtocolError if the frame is damaged or not a ServerStatus."""
    if [checksum(frame) for frame in frames] != reply.checksums or len(frames) != 1:
        raise ProtocolError("the status frame is missing or damaged")
    try:
        return msgspec.msgpack.decode(frames[0], type=ServerStatus)
    except REFUSALS as error:
        raise ProtocolError(f"status refused: {error}") from error
