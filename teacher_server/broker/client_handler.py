"""Process the messages of clients: admit requests, describe the server, drain it."""

from __future__ import annotations

import logging
import time
from itertools import chain

import zmq

from teacher_server.broker.job import Job
from teacher_server.broker.outbox import Outbox
from teacher_server.broker.request_queue import RequestQueue
from teacher_server.broker.status_board import StatusBoard
from teacher_server.broker.teachers import Teachers
from teacher_server.broker.worker_registry import WorkerRegistry
from teacher_server.wire.answers import unpack_prompts
from teacher_server.wire.payload import check_frames, given_planes, unpack_images, unpack_tokens
from teacher_server.wire.protocol import (
    ID_BYTES,
    NO_REQUEST,
    Cancel,
    DrainReply,
    DrainRequest,
    GenerateRequest,
    HeadRequest,
    InfoRequest,
    Ping,
    Pong,
    ProtocolError,
    Received,
    ScoreRequest,
    StatusRequest,
    Work,
    image_digest,
    requests,
    token_digest,
)
from teacher_server.wire.status import encode_status
from teacher_server.wire.worker_protocol import JobCancel, JobReceived, Prompt, images_of, prompts_of

log = logging.getLogger(__name__)


class ClientHandler:
    """Reply to every message at once, or admit it to the request queue."""

    def __init__(
        self,
        epoch: bytes,
        request_queue: RequestQueue,
        teachers: Teachers,
        board: StatusBoard,
        outbox: Outbox,
        registry: WorkerRegistry,
    ) -> None:
        self._epoch = epoch
        self._queue = request_queue
        self._teachers = teachers
        self._board = board
        self._outbox = outbox
        self._registry = registry

    def on_message(self, client: bytes, frames: list[zmq.Frame]) -> None:
        request_id = NO_REQUEST
        try:
            if not frames:
                raise ProtocolError("empty message")
            message = requests.decode(frames[0].buffer)
            if isinstance(message, Ping):
                self._pong(client)
                return
            request_id = message.request_id
            if isinstance(message, ScoreRequest | HeadRequest | GenerateRequest):
                self._submit(client, message, frames)
            elif isinstance(message, Received):
                self._received(client, message)
            elif isinstance(message, Cancel):
                self._cancel(client, request_id)
            elif isinstance(message, InfoRequest):
                self._outbox.reply(client, self._teachers.info(message, self._queue))
            elif isinstance(message, StatusRequest):
                self._outbox.to_client(client, encode_status(request_id, self._board.now()))
            else:
                self._drain(client, message)
        except LookupError as error:
            self._outbox.refuse(client, request_id, "bad_request", str(error.args[0]))
        except ProtocolError as error:
            self._outbox.refuse(client, request_id, "damaged", str(error))

    def _submit(self, client: bytes, request: Work, frames: list[zmq.Frame]) -> None:
        digest = bytes(ID_BYTES)
        prompts = tuple[Prompt, ...]()
        if isinstance(request, ScoreRequest):
            if len(frames) < 2 or len(frames[1]) != 4 * request.total_length:
                raise ProtocolError(f"expected a frame of {request.total_length} token ids")
            check_frames(given_planes(request), [frame.buffer for frame in frames[2:]], request.given_checksums)
            if request.n_own:  # the rows of a reply are checked against this number
                unpack_tokens(request, [frames[1].buffer])
            distinct = [
                image_digest(image.data) for image in unpack_images(request, [frame.buffer for frame in frames[2:]])
            ]
            digest = token_digest(frames[1].buffer, chain(*images_of(request, distinct)))
            prompts = prompts_of(request, frames[1].buffer, distinct)
        elif isinstance(request, GenerateRequest):
            digest = token_digest(unpack_prompts(request, [frame.buffer for frame in frames[1:]]))
        elif len(frames) != 1:
            raise ProtocolError(f"{len(frames)} frames with a request that has none")
        teacher = self._teachers.resolve(request.teacher)
        if self._board.draining and self._queue.find_request(client, request.request_id) is None:
            text = "the server is draining"
            self._outbox.refuse(client, request.request_id, "draining", text, retry_after_s=1.0)
            return
        n_bytes = sum(len(frame) for frame in frames)
        admission = self._queue.submit(client, teacher, request, frames, digest, n_bytes, time.monotonic(), prompts)
        if admission == "full":
            text = f"{self._queue.n_queued} requests ({self._queue.queued_bytes} bytes) are waiting"
            self._outbox.refuse(client, request.request_id, "busy", text, retry_after_s=0.2)

    def _received(self, client: bytes, message: Received) -> None:
        job = self._queue.find_request(client, message.request_id)
        if job is None or job.worker is None or job.stream_id != message.stream_id:
            return  # it belongs to an earlier attempt
        job.deadline_s = time.monotonic() + job.request.deadline_s  # the client is still reading the stream
        n_messages = min(message.n_messages, job.n_parts)  # else a client could make the window arbitrarily large
        header = JobReceived(job_id=job.job_id, stream_id=message.stream_id, n_messages=n_messages)
        self._outbox.to_worker(job.worker, header)

    def _cancel(self, client: bytes, request_id: bytes) -> None:
        job = self._queue.find_request(client, request_id)
        if job is not None:
            self._queue.drop(job)
            self.notify_cancelled(job)

    def notify_cancelled(self, job: Job) -> None:
        """Tell the worker of a dropped job, if it has one, to stop working on it."""
        if job.worker is not None:
            self._outbox.to_worker(job.worker, JobCancel(job_id=job.job_id))

    def _drain(self, client: bytes, message: DrainRequest) -> None:
        if message.worker:
            n_left = self._registry.drain(message.worker)
        else:
            n_left = self._queue.n_jobs
            if not self._board.draining:
                log.info("draining: %d requests left", n_left)
            self._board.draining = True
        self._outbox.reply(client, DrainReply(request_id=message.request_id, n_left=n_left))

    def _pong(self, client: bytes) -> None:
        pong = Pong(
            epoch=self._epoch,
            n_workers=len(self._queue.workers),
            n_queued=self._queue.n_queued,
            draining=self._board.draining,
        )
        self._outbox.reply(client, pong)
