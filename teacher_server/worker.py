"""One engine worker process: waiting requests -> token-budget batches -> engine -> replies.

The server starts it; by hand it is `python -m teacher_server.worker --connect ENDPOINT --model PATH ...`.
It keeps no state that a client depends on, so killing it at any moment loses nothing but time.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from teacher_server.backplane import Assignment, WorkerHello
from teacher_server.engines.base import Engine, TokenSequence, TopK, request_problem
from teacher_server.errors import ServerError
from teacher_server.model_folder import ModelFolder, inspect_model_folder, read_tokenizer_fingerprint
from teacher_server.protocol import (
    ErrorCode,
    ErrorReply,
    ProtocolError,
    ScoreRequest,
    TopKReply,
    checksum,
    pack_topk,
    replies,
    requests,
    token_digest,
    unpack_tokens,
)
from teacher_server.server_log import log_to_stderr
from teacher_server.token_budget import WorkItem, take_batch
from teacher_server.worker_link import WorkerLink

log = logging.getLogger(__name__)

CREDIT_BATCHES = 2  # one being computed, one waiting here, so that the engine never waits for the broker


class Worker:
    """The compute loop; the link is its only way in and out."""

    def __init__(self, engine: Engine, link: WorkerLink, model_fingerprint: str, max_batch_tokens: int) -> None:
        self._engine = engine
        self._link = link
        self._model_fingerprint = model_fingerprint
        self._max_batch_tokens = max_batch_tokens
        self._waiting: list[WorkItem] = []

    def run(self) -> None:
        """Serve until the link ends."""
        while self._fill():
            if self._waiting:
                self._score(take_batch(self._waiting, self._max_batch_tokens))

    def _fill(self) -> bool:
        """Move what has arrived to `waiting`; blocks only if there is nothing to do. False: the link ended."""
        while not self._waiting or not self._link.inbox.empty():
            arrival = self._link.inbox.get()
            if arrival is None:
                return False
            self._accept(*arrival)
        return True

    def _accept(self, job: Assignment, frames: list[zmq.Frame]) -> None:
        request_id = b""
        try:
            request = requests.decode(frames[0].buffer)
            if not isinstance(request, ScoreRequest):
                raise ProtocolError(f"{type(request).__name__} is not work")
            request_id = request.request_id
            sequence = TokenSequence(
                unpack_tokens(request, [frame.buffer for frame in frames[1:]]), request.prompt_length
            )
        except ProtocolError as error:
            # The broker has read this header, so without a request id there is nobody to tell.
            log.error("refused job %s: %s", job.job_id.hex(), error)
            if request_id:
                self._refuse(job.job_id, request_id, "damaged", str(error))
            return
        now_s = time.monotonic()
        item = WorkItem(job.job_id, request, sequence, now_s, job.waited_s, now_s + job.remaining_s)
        problem = request_problem(self._engine, sequence, item.params)
        if problem is None:
            self._waiting.append(item)
        else:
            self._refuse(job.job_id, request_id, "bad_request", problem)

    def _score(self, batch: list[WorkItem]) -> None:
        start_s = time.monotonic()
        for item in [item for item in batch if item.deadline_s < start_s]:
            batch.remove(item)
            self._refuse(item.job_id, item.request.request_id, "deadline", "expired before its forward pass")
        if not batch:
            return
        try:
            scores = self._engine.score_topk([item.sequence for item in batch], batch[0].params)
        except (ArithmeticError, RuntimeError, ValueError, IndexError, MemoryError) as error:
            # Out of memory or a sequence the model chokes on: alone, each fails or passes by itself.
            log.exception("engine failed on a batch of %d", len(batch))
            if len(batch) == 1:
                self._refuse(batch[0].job_id, batch[0].request.request_id, "engine", f"{type(error).__name__}: {error}")
                return
            for item in batch:
                self._score([item])
            return
        compute_s = time.monotonic() - start_s
        for item, scored in zip(batch, scores, strict=True):
            self._answer(item, scored, item.waited_s + start_s - item.received_s, compute_s)

    def _answer(self, item: WorkItem, scored: TopK, queue_s: float, compute_s: float) -> None:
        frames = pack_topk(scored.ids, scored.logprobs, item.request.wire)
        header = TopKReply(
            request_id=item.request.request_id,
            token_digest=token_digest(item.sequence.token_ids),
            model_fingerprint=self._model_fingerprint,
            n_rows=scored.ids.shape[0],
            k=scored.ids.shape[1],
            wire=item.request.wire,
            checksums=[checksum(frame) for frame in frames],
            queue_s=queue_s,
            compute_s=compute_s,
        )
        self._link.answer(item.job_id, [replies.encode(header), *frames])

    def _refuse(self, job_id: bytes, request_id: bytes, code: ErrorCode, text: str) -> None:
        error = ErrorReply(request_id=request_id, code=code, text=text[:1000])
        self._link.answer(job_id, [replies.encode(error)])


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How the server wants its workers; `argv` is the command line of one of them."""

    connect: str
    model: str
    engine: str
    device: str
    dtype: str
    threads: int
    max_batch_tokens: int

    def argv(self, name: str, index: int) -> list[str]:
        options = {
            "connect": self.connect,
            "model": self.model,
            "engine": self.engine,
            "device": self.device,
            "dtype": self.dtype,
            "threads": self.threads,
            "max-batch-tokens": self.max_batch_tokens,
            "name": name,
            "index": index,
            "parent-pid": os.getpid(),
        }
        flags = [part for option, value in options.items() for part in (f"--{option}", str(value))]
        return [sys.executable, "-m", "teacher_server.worker", *flags]


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux)."""
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL) != 0:
        raise ServerError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it died before the call
        raise ServerError(f"the server (pid {parent_pid}) is gone")


def load_engine(args: argparse.Namespace, folder: ModelFolder) -> Engine:
    """The one place where engine names become engines; imports only the library of the one asked for."""
    import torch

    from teacher_server.engines.hf import HfEngine, resolve_device

    torch.set_num_threads(args.threads)
    device = resolve_device(args.device, args.index)
    return HfEngine(args.model, dtype=args.dtype, device=device, max_tokens=folder.max_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m teacher_server.worker", description=__doc__)
    for option in ("connect", "model", "name"):
        parser.add_argument(f"--{option}", required=True)
    parser.add_argument("--engine", default="hf", choices=["hf"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--parent-pid", type=int, default=0, help="die with this process; 0: do not")
    args = parser.parse_args(argv)
    log_to_stderr(args.name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server ends its workers
    try:
        if args.parent_pid:
            die_with_parent(args.parent_pid)
        folder = inspect_model_folder(args.model)
        engine = load_engine(args, folder)
        tokenizer = read_tokenizer_fingerprint(folder)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    hello = WorkerHello(
        name=args.name,
        model_name=folder.name,
        model_path=folder.path,
        model_fingerprint=folder.fingerprint,
        tokenizer_fingerprint=tokenizer,
        vocab_size=engine.vocab_size,
        max_tokens=engine.max_tokens,
        engine=engine.name,
        device=engine.device,
        credit_tokens=CREDIT_BATCHES * args.max_batch_tokens,
    )
    log.info("loaded %s on %s", folder.name, engine.device)
    Worker(engine, WorkerLink(args.connect, hello), folder.fingerprint, args.max_batch_tokens).run()
    return 1


if __name__ == "__main__":
    sys.exit(main())
