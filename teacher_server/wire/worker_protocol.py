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
from typing import Annotated

import msgspec

from teacher_server.wire.protocol import Codec, Count, Header, Id, Name, Text, check_seconds
from teacher_server.wire.status import Gpu

LOCAL_WORKER_NAME = re.compile(r"w\d+\.\d+")  # reserved for the workers that a server starts


class WorkerHello(Header, tag="hello"):
    """Registration and heartbeat of worker `name`. It accepts up to `credit_tokens` of unfinished requests.

    Credit is counted in tokens that its engine computes: `teacher_server.wire.prompts.computed_tokens`.
    """

    name: Name
    teacher: Name
    host: Name
    pid: Count
    model_name: Name
    model_path: Text
    model_fingerprint: Name
    tokenizer_fingerprint: Name
    vocab_size: Count
    hidden_size: Count
    max_tokens: Count
    engine: Name
    device: Name
    dtype: Name
    gpus: Annotated[list[Gpu], msgspec.Meta(max_length=64)]
    credit_tokens: Count
    n_streams: Count  # sequences in flight that keep it busy
    prefix_block: Count = 0  # `Engine.prefix_block`; 0: its engine computes each sequence as a whole
    template_fingerprint: Name = ""
    template_example: Text = ""
    nonce: Annotated[bytes, msgspec.Meta(max_length=16)] = b""  # distinguishes two processes with one pid
    cuda_visible_devices: Text | None = None  # variable of the worker's process; None = unset
    protocol_version: Count = 1  # version of the requests that it understands
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
