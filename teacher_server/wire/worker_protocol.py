"""Messages between the broker and its workers: who is there, what to do, what is done.

    worker -> broker   [WorkerHello]                                     at start and as heartbeat
    broker -> worker   [Assignment, client's request header, token frame]
    worker -> broker   [Part, reply header, rows]...                     of a stream
    worker -> broker   [Done, reply header for the client, reply frames...]
    broker -> worker   [Received | Cancel | Dismiss]

The broker checks a reply (`payload.check_reply`) and forwards its frames untouched. The heartbeat
*is* the registration: a broker that lost track of a worker learns it again with the next one, and
there is no state to get out of step.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from teacher_server.wire.protocol import Codec, Count, Header, Id, Name, Text, check_seconds
from teacher_server.wire.status import Gpu

LOCAL_WORKER_NAME = re.compile(r"w\d+\.\d+")  # of the workers a server starts itself


class WorkerHello(Header, tag="hello"):
    """I am `name`, I hold this model, and may be given `credit_tokens` of unfinished work."""

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
    n_streams: Count  # sequences it wants in flight
    nonce: Annotated[bytes, msgspec.Meta(max_length=16)] = b""  # tells two processes of one pid apart
    cuda_visible_devices: Text | None = None  # of its process; None = unset
    leaving: bool = False  # give me no more; dismiss me when I have nothing left


class Assignment(Header, tag="job"):
    """Work. `waited_s` so far in the broker; useless after another `remaining_s`."""

    job_id: Id  # the broker's; two clients may choose the same request id
    stream_id: Id  # of this attempt: what comes of an earlier one is old news and no fault
    waited_s: float
    remaining_s: float

    def __post_init__(self) -> None:
        check_seconds(waited_s=self.waited_s, remaining_s=self.remaining_s)


class JobReceived(Header, tag="job_received"):
    """The client has `n_messages` of the stream `stream_id`."""

    job_id: Id
    stream_id: Id
    n_messages: Count


class JobCancel(Header, tag="job_cancel"):
    """Nobody waits for this job any more; it is not answered."""

    job_id: Id


class Dismiss(Header, tag="dismiss"):
    """End yourself. `why` is empty after a drain; otherwise you are not wanted here."""

    why: Text = ""


class Part(Header, tag="part"):
    """The rest of the message is for the client who asked, and more will come."""

    job_id: Id


class Done(Header, tag="done"):
    """The rest of the message is for the client who asked, and the job is finished."""

    job_id: Id


WorkerMessage = WorkerHello | Part | Done
BrokerMessage = Assignment | JobReceived | JobCancel | Dismiss
from_worker: Codec[WorkerMessage] = Codec(WorkerMessage)
to_worker: Codec[BrokerMessage] = Codec(BrokerMessage)
