"""Compute loop of a worker: waiting requests -> token-budget batches -> engine -> replies and streams.

It keeps no state that a client depends on, so a worker can be killed at any time without losing requests.
"""

from __future__ import annotations

import logging
import queue
import time

import numpy as np
import zmq

from teacher_server.engines.base import Engine, RowStream, Scores, TokenSequence, request_problem
from teacher_server.wire.given_ids import unpack_given
from teacher_server.wire.payload import TopKScores, pack_sampled, pack_topk, unpack_tokens
from teacher_server.wire.protocol import (
    ID_BYTES,
    Buffer,
    ErrorCode,
    ErrorReply,
    HeadRequest,
    ProtocolError,
    ScoreReply,
    ScoreRequest,
    checksum,
    replies,
    requests,
    token_digest,
)
from teacher_server.wire.worker_protocol import Assignment, JobCancel, JobReceived
from teacher_server.worker.link import End, Event, NewConnection, Work, WorkerLink
from teacher_server.worker.open_stream import OpenStream, open_stream
from teacher_server.worker.token_budget import WorkItem, take_batch

log = logging.getLogger(__name__)

CREDIT_BATCHES = 2  # one batch is computed, one waits here, so the engine never waits for the broker
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
        self._engine, self._link = engine, link
        self._model_fingerprint, self._name = model_fingerprint, worker_name
        self._max_batch_tokens = max_batch_tokens
        self._waiting: list[WorkItem] = []
        self._streams: dict[bytes, OpenStream] = {}  # by job_id
        self._n_runtime_errors = self._n_nans = 0

    def run(self) -> str:
        """Serve until the link ends. Returns the reason, empty after a drain."""
        while True:
            busy = bool(self._waiting) or any(stream.may_send for stream in self._streams.values())
            while not busy or not self._link.inbox.empty():
                try:
                    event = self._link.inbox.get(timeout=_POLL_S if self._streams else None)
                except queue.Empty:
                    break
                if isinstance(event, End):
                    return event.reason
                self._on_event(event)
                busy = True
            now_s = time.monotonic()
            for job_id in [job_id for job_id, stream in self._streams.items() if stream.deadline_s < now_s]:
                log.warning("closed the stream of job %s: no receipt before its deadline", job_id.hex())
                self._close(job_id)
            for stream in [stream for stream in self._streams.values() if stream.may_send]:
                self._send_rows(stream)
            if self._waiting:
                self._score(take_batch(self._waiting, self._max_batch_tokens))

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
            self._waiting = [item for item in self._waiting if item.job_id != event.job_id]
            self._close(event.job_id)
        elif isinstance(event, NewConnection):
            self._waiting.clear()
            for job_id in list(self._streams):
                self._close(job_id)

    def _accept(self, job: Assignment, frames: list[zmq.Frame]) -> None:
        request_id = b""
        now_s = time.monotonic()
        try:
            request = requests.decode(frames[0].buffer)
            if not isinstance(request, ScoreRequest | HeadRequest):
                raise ProtocolError(f"{type(request).__name__} is not work")
            request_id = request.request_id
            if isinstance(request, HeadRequest):
                self._open_head(job, request)
                return
            buffers = [frame.buffer for frame in frames[1:]]
            tokens, given = unpack_tokens(request, buffers[:1]), unpack_given(request, buffers[1:])
        except ProtocolError as error:
            # The broker has checked this header, so without a request id no client can get the error.
            log.error("refused job %s: %s", job.job_id.hex(), error)
            if request_id:
                self._refuse(job.job_id, request_id, "damaged", str(error))
            return
        sequence = TokenSequence(tokens, request.prompt_length, given)
        deadline_s = now_s + job.remaining_s
        item = WorkItem(job, request, sequence, token_digest(tokens), now_s, job.waited_s, deadline_s)
        problem = request_problem(self._engine, sequence, item.params)
        if problem is None:
            self._waiting.append(item)
        else:
            self._refuse(job.job_id, request_id, "bad_request", problem)

    # Batches

    def _score(self, batch: list[WorkItem]) -> None:
        start_s = time.monotonic()
        for item in [item for item in batch if item.deadline_s < start_s]:
            batch.remove(item)
            self._refuse(item.job_id, item.request.request_id, "deadline", "expired before its forward pass")
        if not batch:
            return
        scores: list[Scores] | None
        try:
            with self._link.computing():
                scores = self._engine.score([item.sequence for item in batch], batch[0].params)
        except _ENGINE_ERRORS as error:
            if len(batch) == 1:
                log.exception("engine failed on a sequence")
                self._on_engine_error(batch[0].job_id, batch[0].request.request_id, error)
                return
            log.warning("engine failed on a batch of %d (%s); repeating its sequences one by one", len(batch), error)
            scores = None
        if scores is None:
            for item in batch:
                self._score([item])
            return
        self._n_runtime_errors = self._n_nans = 0
        compute_s = time.monotonic() - start_s
        for item, scored in zip(batch, scores, strict=True):
            self._reply(item, scored, item.waited_s + start_s - item.received_s, compute_s)

    def _reply(self, item: WorkItem, scored: Scores, queue_s: float, compute_s: float) -> None:
        request = item.request
        if isinstance(scored, TopKScores | np.ndarray):
            counts = scored.counts if isinstance(scored, TopKScores) else None
            header = ScoreReply(
                request_id=request.request_id,
                token_digest=item.digest,
                model_fingerprint=self._model_fingerprint,
                worker=self._name,
                signal="topk" if isinstance(scored, TopKScores) else "sampled",
                n_rows=request.n_response,
                k=request.k,
                n_entries=request.n_response * request.k if counts is None else int(counts.sum()),
                adaptive=counts is not None,
                wire=request.wire,
                checksums=[],
                queue_s=queue_s,
                compute_s=compute_s,
                with_sampled=request.with_sampled,
            )
            frames = pack_topk(scored, header) if isinstance(scored, TopKScores) else pack_sampled(scored, header)
            header.checksums = [checksum(frame) for frame in frames]
            self._link.send_reply(item.job_id, [replies.encode(header), *frames])
            return
        self._open(item.job, request.request_id, item.digest, scored, request.signal, queue_s, compute_s)

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
        self._close(job.job_id)  # of an earlier attempt, if the broker has assigned the job again
        try:
            self._streams[job.job_id] = open_stream(
                job,
                request_id,
                digest,
                rows,
                signal,
                model_fingerprint=self._model_fingerprint,
                worker=self._name,
                queue_s=queue_s,
                compute_s=compute_s,
            )
        except ProtocolError as error:
            rows.close()
            self._refuse(job.job_id, request_id, "bad_request", str(error))

    def _send_rows(self, stream: OpenStream) -> None:
        try:
            with self._link.computing():
                messages = stream.next_messages()
        except _ENGINE_ERRORS as error:
            log.exception("engine failed in a stream")
            self._close(stream.job_id)
            self._on_engine_error(stream.job_id, stream.header.request_id, error)
            return
        for frames, last in messages:
            self._link.send_reply(stream.job_id, frames, final=last)
        if stream.finished:
            self._close(stream.job_id)

    def _close(self, job_id: bytes) -> None:
        stream = self._streams.pop(job_id, None)
        if stream is not None:
            with self._link.computing():
                stream.rows.close()

    # Errors

    def _on_engine_error(self, job_id: bytes, request_id: bytes, error: BaseException) -> None:
        self._refuse(job_id, request_id, "engine", f"{type(error).__name__}: {error}")
        self._n_runtime_errors = self._n_runtime_errors + 1 if isinstance(error, RuntimeError) else 0
        self._n_nans = self._n_nans + 1 if isinstance(error, ArithmeticError) else 0
        if self._n_runtime_errors >= _MAX_RUNTIME_ERRORS or self._n_nans >= _MAX_NANS:
            raise RuntimeError(f"the engine fails repeatedly: {error}") from error

    def _refuse(self, job_id: bytes, request_id: bytes, code: ErrorCode, text: str) -> None:
        error: list[Buffer] = [replies.encode(ErrorReply(request_id=request_id, code=code, text=text[:1000]))]
        self._link.send_reply(job_id, error)
