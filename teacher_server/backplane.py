"""Messages between the broker and its workers: who is there, what to do, what is done.

    worker -> broker   [WorkerHello]                                     at start and as heartbeat
    broker -> worker   [Assignment, client's request header, token frame]
    worker -> broker   [Done, reply header for the client, reply frames...]

The broker reads only the first frame and forwards the rest untouched, so a new signal (hidden
states, logits) needs no change here. The heartbeat *is* the registration: a broker that lost
track of a worker learns it again with the next one, and there is no state to get out of step.
"""

from __future__ import annotations

from teacher_server.protocol import Codec, Count, Header, Id, Text


class WorkerHello(Header, tag="hello"):
    """I am `name`, I hold this model, and may be given `credit_tokens` of unfinished work."""

    name: Text
    model_name: Text
    model_path: Text
    model_fingerprint: Text
    tokenizer_fingerprint: Text
    vocab_size: Count
    max_tokens: Count
    engine: Text
    device: Text
    credit_tokens: Count


class Assignment(Header, tag="job"):
    """Work. `waited_s` so far in the broker; useless after another `remaining_s`."""

    job_id: Id  # the broker's; two clients may choose the same request id
    waited_s: float
    remaining_s: float


class Done(Header, tag="done"):
    """The rest of the message is for the client who asked."""

    job_id: Id


WorkerMessage = WorkerHello | Done
from_worker: Codec[WorkerMessage] = Codec(WorkerMessage)
to_worker: Codec[Assignment] = Codec(Assignment)
