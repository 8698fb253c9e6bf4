"""Compute loop of a worker: waiting requests -> token-budget batches -> engine -> replies and streams.

It keeps no state that a client depends on, so a worker can be killed at any time without losing requests.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import zmq

from teacher_server.engines.base import (
    Engine,
    RowStream,
    Scores,
    TokenSequence,
    Writer,
    pads,
    prefix_block,
    request_problem,
)
from teacher_server.wire.payload import rows_per_message
from teacher_server.wire.protocol import (
    ID_BYTES,
    ErrorCode,
    ErrorReply,
    GenerateRequest,
    HeadRequest,
    ProtocolError,
    RowsReply,
    ScoreRequest,
    as_frame,
    replies,
    requests,
)
from teacher_server.wire.table import TopKTable
from teacher_server.wire.worker_protocol import Assignment, JobCancel, JobReceived, computed_tokens, prompt_digest
from teacher_server.worker.link import End, Event, NewConnection, Work, WorkerLink
from teacher_server.worker.open_generation import OpenGeneration, generation_problem, open_generation
from teacher_server.worker.open_request import OpenRequest, OpenStream, UnitMaps, open_request


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """A sequence that waits for its forward pass."""

    request: OpenRequest
    index: int  # position in the request
    sequence: TokenSequence
    prompt: int = field(init=False)  # digest

    def __post_init__(self) -> None:
        ids = as_frame(self.sequence.token_ids[: self.sequence.prompt_length])
        object.__setattr__(self, "prompt", prompt_digest(ids, [image.digest for image in self.sequence.images]))

    @property
    def n_tokens(self) -> int:
        return len(self.sequence.token_ids)


class _Budget:
    """Tokens of a batch: whole sequences, and further ones of their prompts, each padded to their longest if `pads`."""

    def __init__(self, prefix_block: int, pads: bool) -> None:
        self._block = prefix_block
        self._pads = pads
        self._n_tokens = 0
        self._prompts = set[int]()
        self._wholes = self._others = (0, 0)  # number, longest

    def add(self, item: WorkItem, limit: float = math.inf) -> bool:
        """Add `item` if all tokens together are at most `limit` then; return whether it was added."""
        is_known = item.prompt in self._prompts
        n_tokens = computed_tokens(item.sequence.prompt_length, item.n_tokens, self._block, known=is_known)
        wholes = self._wholes
        shared = self._others
        if n_tokens == item.n_tokens:
            wholes = wholes[0] + 1, max(wholes[1], n_tokens)
        else:
            shared = shared[0] + 1, max(shared[1], n_tokens)
        n_padded = wholes[0] * wholes[1] + shared[0] * shared[1]
        if (n_padded if self._pads else self._n_tokens + n_tokens) > limit:
            return False
        self._wholes = wholes
        self._others = shared
        self._n_tokens += n_tokens
        self._prompts.add(item.prompt)
        return True


def take_batch(
    waiting: list[WorkItem], max_batch_tokens: int, prefix_block: int = 0, *, pads: bool = True
) -> list[WorkItem]:
    """Remove and return the next batch. `waiting` is in order of arrival and not empty.

    The batch contains the oldest item, so no request starves. Items with the same parameters are added,
    nearest in length first, while the tokens that the engine computes (padded: sequences x longest length) are at most
    `max_batch_tokens`. A sequence longer than the budget is a batch by itself.

    Args:
        prefix_block: of the engine; with it, sequences with the same prompt stay together, and `computed_tokens` counts
            them.
        pads: whether the engine pads the sequences of a batch to the longest one.
    """
    params = waiting[0].request.params
    budget = _Budget(prefix_block, pads)
    budget.add(waiting[0])
    ordered = _nearest_first(waiting, together=prefix_block > 0)
    batch = [
        waiting[0],
        *(item for item in ordered if item.request.params == params and budget.add(item, max_batch_tokens)),
    ]
    taken = {id(item) for item in batch}
    waiting[:] = [item for item in waiting if id(item) not in taken]
    return batch


def _nearest_first(waiting: Sequence[WorkItem], *, together: bool) -> list[WorkItem]:
    """Return all items but the oldest, sorted by their distance in length from it.

    Args:
        together: sort whole groups with a common prompt by their nearest item; the group of the oldest is the first.
    """
    oldest = waiting[0]
    items = waiting[1:]
    distances = [abs(item.n_tokens - oldest.n_tokens) for item in items]
    if not together:
        return [item for _, _, item in sorted(zip(distances, range(len(items)), items, strict=True))]
    groups = {oldest.prompt: (-1, -1)}  # prompt -> distance of its nearest item, position of its oldest item
    for position, (distance, item) in enumerate(zip(distances, items, strict=True)):
        nearest, first = groups.get(item.prompt, (distance, position))
        groups[item.prompt] = min(nearest, distance), first
    keys = [(groups[item.prompt], distance) for item, distance in zip(items, distances, strict=True)]
    return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__)]


log = logging.getLogger(__name__)

CREDIT_BATCHES = 4  # one batch is computed; the next ones are full and of like lengths if three wait here
# Out of memory, or a sequence that the model cannot process. Sequences of a failed batch are repeated one by one.
_ENGINE_ERRORS = (ArithmeticError, RuntimeError, ValueError, IndexError, MemoryError)
_MAX_RUNTIME_ERRORS = 3  # consecutive: the device has failed, and a new process may recover it
_MAX_NANS = 10  # consecutive: one sequence may cause a NaN, but hardly ten
_POLL_S = 1.0  # largest delay until a stream without receipts is closed


class Worker:
    """Compute the requests that arrive on `link`, and reply on `link`."""

    def __init__(
        self, engine: Engine, link: WorkerLink, model_fingerprint: str, worker_name: str, max_batch_tokens: int
    ) -> None:
        self._engine = engine
        self._link = link
        self._model_fingerprint = model_fingerprint
        self._name = worker_name
        self._max_batch_tokens = max_batch_tokens
        self._prefix_block = prefix_block(engine)
        self._pads = pads(engine)
        self._waiting: list[WorkItem] = []
        self._streams: dict[bytes, OpenStream] = {}  # job_id -> open stream
        self._generations: list[OpenGeneration] = []  # they wait until nothing is to score
        self._generating = b""  # job_id of the one that runs; empty: none, or it was cancelled
        self._unit_maps = UnitMaps()
        self._n_runtime_errors = self._n_nans = 0

    def run(self) -> str:
        """Serve until the link ends. Returns the reason, empty after a drain."""
        while True:
            may_send = any(stream.may_send for stream in self._streams.values())
            end = self._take_events(busy=bool(self._waiting or self._generations) or may_send)
            self._send_streams()
            if end is None and self._waiting:
                self._score(take_batch(self._waiting, self._max_batch_tokens, self._prefix_block, pads=self._pads))
            elif end is None and self._generations:
                end = self._generate(self._generations.pop(0))
            if end is not None:
                return end.reason

    def _take_events(self, *, busy: bool) -> End | None:
        """Process the events of the link that have arrived; unless `busy` wait for one. Returns the end of the link."""
        while not busy or not self._link.inbox.empty():
            try:
                event = self._link.inbox.get(timeout=_POLL_S if self._streams else None)
            except queue.Empty:
                break
            if isinstance(event, End):
                return event
            self._on_event(event)
            busy = True
        return None

    def _send_streams(self) -> None:
        """Send what the open streams may send, and close those without receipts."""
        now_s = time.monotonic()
        for job_id in [job_id for job_id, stream in self._streams.items() if stream.deadline_s < now_s]:
            log.warning("closed the stream of job %s: no receipt before its deadline", job_id.hex())
            self._close(job_id)
        for stream in [stream for stream in self._streams.values() if stream.may_send]:
            self._send_rows(stream)

    # Events of the link

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Work):
            self._accept(event.job, event.frames)
        elif isinstance(event, JobReceived):
            stream = self._streams.get(event.job_id)
            if stream is not None and stream.stream_id == event.stream_id:
                stream.received = max(stream.received, event.n_messages)
                stream.deadline_s = time.monotonic() + stream.timeout_s
        elif isinstance(event, JobCancel):
            self._waiting = [item for item in self._waiting if item.request.job.job_id != event.job_id]
            self._generations = [opened for opened in self._generations if opened.job.job_id != event.job_id]
            if self._generating == event.job_id:
                self._generating = b""
            self._close(event.job_id)
        elif isinstance(event, NewConnection):
            self._waiting.clear()
            self._generations.clear()
            self._generating = b""
            for job_id in list(self._streams):
                self._close(job_id)

    def _accept(self, job: Assignment, frames: list[zmq.Frame]) -> None:
        request_id = b""
        now_s = time.monotonic()
        try:
            request = requests.decode(frames[0].buffer)
            if not isinstance(request, ScoreRequest | HeadRequest | GenerateRequest):
                raise ProtocolError(f"{type(request).__name__} is not work")
            request_id = request.request_id
            if isinstance(request, HeadRequest):
                self._open_head(job, request)
                return
            buffers = [frame.buffer for frame in frames[1:]]
            if isinstance(request, GenerateRequest):
                self._accept_generation(open_generation(job, request, buffers, now_s))
                return
            opened, sequences = open_request(job, request, buffers, now_s, self._unit_maps)
        except LookupError as error:
            self._refuse(job.job_id, request_id, "units", str(error))
            return
        except ProtocolError as error:
            # The broker has checked this header, so without a request id no client can get the error.
            log.error("refused job %s: %s", job.job_id.hex(), error)
            if request_id:
                self._refuse(job.job_id, request_id, "damaged", str(error))
            return
        for index, sequence in enumerate(sequences):
            problem = request_problem(self._engine, sequence, opened.params)
            if problem is not None:
                self._refuse(job.job_id, request_id, "bad_request", problem, index)
                return
        self._waiting += [WorkItem(opened, index, sequence) for index, sequence in enumerate(sequences)]

    # Batches

    def _score(self, batch: list[WorkItem]) -> None:
        start_s = time.monotonic()
        for item in batch:
            if item.request.deadline_s < start_s:
                self._drop(item, "deadline", "expired before its forward pass")
        batch = [item for item in batch if not item.request.refused]
        if not batch:
            return
        scores: list[Scores] | None
        try:
            with self._link.computing():
                scores = self._engine.score([item.sequence for item in batch], batch[0].request.params)
        except _ENGINE_ERRORS as error:
            if len(batch) == 1:
                log.exception("engine failed on a sequence")
                self._drop(batch[0], "engine", _described(error))
                self._count(error)
                return
            log.warning("engine failed on a batch of %d (%s); repeating its sequences one by one", len(batch), error)
            scores = None
        if scores is None:
            for item in batch:
                self._score([item])
            return
        self._n_runtime_errors = self._n_nans = 0
        end_s = time.monotonic()
        for item, scored in zip(batch, scores, strict=True):
            if item.request.add(item.index, scored, start_s):
                self._reply(item.request, end_s - item.request.started_s)

    def _reply(self, request: OpenRequest, compute_s: float) -> None:
        header = request.header
        job = request.job
        if header.signal in ("topk", "sampled"):
            self._link.send_reply(job.job_id, partial(request.reply, self._model_fingerprint, self._name, compute_s))
            return
        rows = request.scores[0]
        assert not isinstance(rows, TopKTable | np.ndarray), "the engine returns what was requested"
        self._open(job, header.request_id, request.digest, rows, header.signal, request.queue_s, compute_s)

    def _drop(self, item: WorkItem, code: ErrorCode, text: str) -> None:
        """Refuse the request of `item`, once, and forget its other sequences."""
        request = item.request
        if request.refused:
            return
        request.refused = True
        self._waiting = [other for other in self._waiting if other.request is not request]
        self._refuse(request.job.job_id, request.header.request_id, code, text, item.index)

    # Answers

    def _accept_generation(self, opened: OpenGeneration) -> None:
        if problem := generation_problem(self._engine, opened):
            text, index = problem
            self._refuse(opened.job.job_id, opened.header.request_id, "bad_request", text, index)
            return
        self._generations.append(opened)

    def _generate(self, opened: OpenGeneration) -> End | None:
        """Write the answers of a request and send them, unless it is cancelled. Returns the end of the link."""
        assert isinstance(self._engine, Writer), "checked in `_accept_generation`"
        job_id = opened.job.job_id
        self._generating = job_id
        started_s = time.monotonic()
        steps = self._engine.generate(opened.prompts, opened.header.seeds, opened.writing)
        try:
            answers: list[np.ndarray] | None = None
            while answers is None:
                with self._link.computing():
                    answers = next(steps)
                if end := self._take_events(busy=True):
                    return end
                if not self._generating:
                    return None
                self._send_streams()
        except _ENGINE_ERRORS as error:
            log.exception("engine failed while it wrote answers")
            self._refuse(job_id, opened.header.request_id, "engine", _described(error))
            self._count(error)
            return None
        finally:
            steps.close()
            self._generating = b""
        self._n_runtime_errors = self._n_nans = 0
        ended_s = time.monotonic()
        make = partial(opened.reply, answers, self._model_fingerprint, self._name, started_s, ended_s)
        self._link.send_reply(job_id, make)
        return None

    # Streams

    def _open_head(self, job: Assignment, request: HeadRequest) -> None:
        if not self._engine.has_plain_head:
            problem = "signal hidden is not supported: the LM head of this model is more than a matrix"
            self._refuse(job.job_id, request.request_id, "bad_request", problem)
            return
        with self._link.computing():
            rows = self._engine.lm_head(request.wire)
        self._open(job, request.request_id, bytes(ID_BYTES), rows, "head", job.waited_s, 0.0)

    def _open(
        self,
        job: Assignment,
        request_id: bytes,
        digest: bytes,
        rows: RowStream,
        signal: str,
        queue_s: float,
        compute_s: float,
    ) -> None:
        self._close(job.job_id)  # closes an earlier attempt's stream, if the broker has assigned the job again
        try:
            rows_per_message(rows.n_cols, rows.dtype)
        except ProtocolError as error:  # a row does not fit a frame
            rows.close()
            self._refuse(job.job_id, request_id, "bad_request", str(error))
            return
        header = RowsReply(
            request_id=request_id,
            token_digest=digest,
            model_fingerprint=self._model_fingerprint,
            worker=self._name,
            stream_id=job.stream_id,
            signal=signal,  # type: ignore[arg-type]
            index=0,
            start=0,
            stop=1,
            n_rows=rows.n_rows,
            n_cols=rows.n_cols,
            dtype=rows.dtype,
            checksums=[],
            queue_s=queue_s,
            compute_s=compute_s,
        )
        deadline_s = time.monotonic() + job.remaining_s
        self._streams[job.job_id] = OpenStream(job.job_id, job.stream_id, rows, header, job.remaining_s, deadline_s)

    def _send_rows(self, stream: OpenStream) -> None:
        try:
            with self._link.computing():
                messages = stream.next_messages()
        except _ENGINE_ERRORS as error:
            log.exception("engine failed in a stream")
            self._close(stream.job_id)
            self._refuse(stream.job_id, stream.header.request_id, "engine", _described(error))
            self._count(error)
            return
        for frames, last in messages:
            self._link.send_reply(stream.job_id, partial(list, frames), final=last)
        if stream.finished:
            self._close(stream.job_id)

    def _close(self, job_id: bytes) -> None:
        stream = self._streams.pop(job_id, None)
        if stream is not None:
            with self._link.computing():
                stream.rows.close()

    # Errors

    def _count(self, error: BaseException) -> None:
        """Raise RuntimeError if the engine has failed too often."""
        self._n_runtime_errors = self._n_runtime_errors + 1 if isinstance(error, RuntimeError) else 0
        self._n_nans = self._n_nans + 1 if isinstance(error, ArithmeticError) else 0
        if self._n_runtime_errors >= _MAX_RUNTIME_ERRORS or self._n_nans >= _MAX_NANS:
            raise RuntimeError(f"the engine fails repeatedly: {error}") from error

    def _refuse(self, job_id: bytes, request_id: bytes, code: ErrorCode, text: str, index: int = 0) -> None:
        """Send an error; `index` is the index of the sequence that failed."""
        error = ErrorReply(request_id=request_id, code=code, text=text[:1000], sequence=index)
        self._link.send_reply(job_id, lambda: [replies.encode(error)])


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
