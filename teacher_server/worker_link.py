"""A worker's line to the broker: a thread that owns the DEALER, so that heartbeats go on during a forward pass.

broker <--DEALER--> link thread --inbox (queue)--> compute thread
                                <--outbox (inproc)--
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from teacher_server.backplane import Assignment, Done, WorkerHello, from_worker, to_worker
from teacher_server.broker import HEARTBEAT_S
from teacher_server.protocol import ID_BYTES, ProtocolError

log = logging.getLogger(__name__)

Arrival = tuple[Assignment, list[zmq.Frame]]


class WorkerLink:
    """Connects and says hello at once; `inbox` yields (assignment, [request header, token frame]).

    A None in the inbox means that the link has ended, and with it the worker's purpose.
    """

    def __init__(self, endpoint: str, hello: WorkerHello) -> None:
        self.inbox: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._hello = from_worker.encode(hello)
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IDENTITY, b"w" + os.urandom(ID_BYTES - 1))
        self._dealer.setsockopt(zmq.LINGER, 0)
        # The credit bounds what is under way; a mark in messages could only lose some of it.
        self._dealer.setsockopt(zmq.SNDHWM, 0)
        self._dealer.setsockopt(zmq.RCVHWM, 0)
        self._dealer.connect(endpoint)
        outbox = f"inproc://outbox-{os.urandom(8).hex()}"
        self._outbox_out = self._context.socket(zmq.PULL)
        self._outbox_out.bind(outbox)
        self._outbox_in = self._context.socket(zmq.PUSH)
        self._outbox_in.connect(outbox)
        threading.Thread(target=self._run, name="link", daemon=True).start()

    def answer(self, job_id: bytes, frames: Sequence[Any]) -> None:
        """Send a reply [header, frames...] to whoever asked; only the compute thread calls it.

        The buffers are not copied: do not write to them afterwards.
        """
        self._outbox_in.send_multipart([from_worker.encode(Done(job_id=job_id)), *frames], copy=False)

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._dealer, zmq.POLLIN)
            poller.register(self._outbox_out, zmq.POLLIN)
            next_hello_s = time.monotonic()
            while True:
                wait_s = next_hello_s - time.monotonic()
                if wait_s <= 0:
                    self._dealer.send(self._hello)
                    next_hello_s = time.monotonic() + HEARTBEAT_S
                    continue
                ready = dict(poller.poll(int(wait_s * 1000) + 1))
                if self._outbox_out in ready:
                    self._dealer.send_multipart(self._outbox_out.recv_multipart(copy=False), copy=False)
                if self._dealer in ready:
                    self._receive(self._dealer.recv_multipart(copy=False))
        finally:
            self.inbox.put(None)

    def _receive(self, frames: list[zmq.Frame]) -> None:
        try:
            self.inbox.put((to_worker.decode(frames[0].buffer), frames[1:]))
        except ProtocolError as error:
            log.error("dropped a message of the broker: %s", error)
