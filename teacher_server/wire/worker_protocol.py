"""Messages between the broker and its workers: registration, assignments and results.

    worker -> broker   [WorkerHello]                                     at start and as heartbeat
    broker -> worker   [Assignment, client's request header and frames]
    worker -> broker   [Part, reply header, rows]...                     of a stream
    worker -> broker   [Done, reply header for the client, reply frames...]
    broker -> worker   [JobReceived | JobCancel | Dismiss]

The broker checks a reply (`payload.check_reply`) and forwards its frames unchanged. The heartbeat *is*
the registration: a broker that has dropped a worker registers it again with the next heartbeat, so the
two cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from teacher_server.wire.protocol import (
    Buffer,
    Codec,
    Count,
    Header,
    Id,
    ModelHeader,
    Name,
    ScoreRequest,
    Text,
    check_seconds,
    checksum,
)
from teacher_server.wire.status import Gpu

LOCAL_WORKER_NAME = re.compile(r"w\d+\.\d+")  # reserved for the workers that a server starts


class WorkerHello(ModelHeader, tag="hello", kw_only=True):
    """Registration and heartbeat of worker `name`. It accepts up to `credit_tokens` of unfinished requests.

    Credit is counted in tokens that its engine computes: `computed_tokens`.
    """

    name: Name
    host: Name
    pid: Count
    gpus: Annotated[list[Gpu], msgspec.Meta(max_length=64)]
    credit_tokens: Count
    prefix_block: Count = 0  # `Engine.prefix_block`; 0: its engine computes each sequence as a whole
    nonce: Annotated[bytes, msgspec.Meta(max_length=16)] = b""  # distinguishes two processes with one pid
    cuda_visible_devices: Text | None = None  # variable of the worker's process; None = unset
    leaving: bool = False  # assign no more requests, and dismiss the worker when it has finished


class Assignment(Header, tag="job"):
    """A request for this worker."""

    job_id: Id  # set by the broker, because two clients may choose the same request id
    stream_id: Id  # id of this attempt; rows of an earlier attempt are dropped without excluding the worker
    waited_s: float  # time in the queue so far
    remaining_s: float  # time until the deadline

    def __post_init__(self) -> None:
        check_seconds(waited_s=self.waited_s, remaining_s=self.remaining_s)


class JobReceived(Header, tag="job_received"):
    """The client has received `n_messages` of the stream `stream_id`."""

    job_id: Id
    stream_id: Id
    n_messages: Count


class JobCancel(Header, tag="job_cancel"):
    """Drop this job. There is no reply."""

    job_id: Id


class Dismiss(Header, tag="dismiss"):
    """The worker must exit. `why` is empty after a drain, else the reason of the refusal or exclusion."""

    why: Text = ""


class Part(Header, tag="part"):
    """The rest of the message is for the client; more messages follow."""

    job_id: Id


class Done(Header, tag="done"):
    """The rest of the message is for the client; the job is finished."""

    job_id: Id


WorkerMessage = WorkerHello | Part | Done
BrokerMessage = Assignment | JobReceived | JobCancel | Dismiss
from_worker: Codec[WorkerMessage] = Codec(WorkerMessage)
to_worker: Codec[BrokerMessage] = Codec(BrokerMessage)


_TOKEN_BYTES = 4
T = TypeVar("T")


class Prompt(NamedTuple):
    """The prompt of one sequence, as two numbers of 64 bits. Equal digests decide about speed only."""

    digest: int
    # Digest without the last token, if R = 1: greedy responses of a teacher grow by one token with each request, so
    # this is the prompt of the request before. Else the same as `digest`.
    parent: int


def prompt_digest(ids: Buffer, images: Sequence[bytes]) -> int:
    """Return the digest of a prompt's token ids and of its images' digests: two images of one size have equal ids."""
    return checksum(b"".join([checksum(ids).to_bytes(8, "little"), *images])) if images else checksum(ids)


def images_of(request: ScoreRequest, distinct: Sequence[T]) -> list[tuple[T, ...]]:
    """Return for the images of each sequence of a request what `distinct` has for each distinct image."""
    if not distinct:
        return [()] * len(request.sequences)
    return [tuple(distinct[i] for i in own) for own in request.image_indices]


def prompts_of(request: ScoreRequest, tokens: Buffer, images: Sequence[bytes] = ()) -> tuple[Prompt, ...]:
    """Return the prompt of each sequence of a request.

    Args:
        tokens: the request's token frame, 4 bytes a token, of `request.total_length` tokens.
        images: digests of the distinct images.
    """
    view = memoryview(tokens).cast("B")
    prompts = []
    start = 0
    for (n_prompt, n_total), own_images in zip(request.sequences, images_of(request, images), strict=True):
        ids = view[_TOKEN_BYTES * start : _TOKEN_BYTES * (start + n_prompt)]
        digest = prompt_digest(ids, own_images)
        parent = prompt_digest(ids[:-_TOKEN_BYTES], own_images) if n_total - n_prompt == 1 else digest
        prompts.append(Prompt(digest, parent))
        start += n_total
    return tuple(prompts)


def computed_tokens(n_prompt: int, n_total: int, block: int, *, known: bool) -> int:
    """Return the most tokens that an engine computes for a sequence of P = `n_prompt` and P + R = `n_total` tokens.

    Args:
        block: `Engine.prefix_block`; 0 for an engine that computes each sequence as a whole.
        known: whether the engine has computed this prompt in the same batch.
    """
    return n_total - n_prompt + block if known and n_prompt > block > 0 else n_total
