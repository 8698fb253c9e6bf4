"""A request for answers at a worker: its prompts, and the reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teacher_server.engines.base import Limits, Writer, Writing
from teacher_server.wire.answers import unpack_prompts
from teacher_server.wire.protocol import (
    Buffer,
    GenerateReply,
    GenerateRequest,
    as_frame,
    checksum,
    replies,
    token_digest,
)
from teacher_server.wire.table import row_slices
from teacher_server.wire.worker_protocol import Assignment


@dataclass(frozen=True, slots=True, eq=False)
class OpenGeneration:
    """Times are on this process's monotonic clock."""

    job: Assignment
    header: GenerateRequest
    prompts: list[np.ndarray]  # [P] int32 each
    received_s: float

    @property
    def writing(self) -> Writing:
        """Return how to write the answers."""
        r = self.header
        return Writing(r.n, r.temperature, r.top_p, r.max_tokens, r.n_vocab, tuple(r.stop_ids))

    def reply(
        self, answers: Sequence[np.ndarray], model_fingerprint: str, worker: str, started_s: float, ended_s: float
    ) -> list[Buffer]:
        """Return the header and the frame of the reply."""
        frame = as_frame(np.concatenate(answers).astype("<i4"))
        header = GenerateReply(
            request_id=self.header.request_id,
            token_digest=token_digest(np.concatenate(self.prompts)),
            model_fingerprint=model_fingerprint,
            worker=worker,
            lengths=[len(answer) for answer in answers],
            checksum=checksum(frame),
            queue_s=self.job.waited_s + started_s - self.received_s,
            compute_s=ended_s - started_s,
        )
        return [replies.encode(header), frame]


def open_generation(job: Assignment, header: GenerateRequest, frames: Sequence[Buffer], now_s: float) -> OpenGeneration:
    """Return a request that has arrived. Raises ProtocolError: the frames do not match the header."""
    ids = unpack_prompts(header, frames)
    return OpenGeneration(job, header, [ids[part] for part in row_slices(header.lengths)], now_s)


def generation_problem(engine: Limits, opened: OpenGeneration) -> tuple[str, int] | None:
    """Return why this engine cannot write the answers, and the index of the prompt; or None."""
    if not isinstance(engine, Writer):
        return "this engine writes no answers. Fix: start the teacher server with --engine vllm", 0
    header = opened.header
    if header.n_vocab > engine.vocab_size:
        return f"n_vocab = {header.n_vocab} is more than this model's vocabulary of {engine.vocab_size}", 0
    for index, prompt in enumerate(opened.prompts):
        if len(prompt) + header.max_tokens > engine.max_tokens:
            problem = f"a prompt of {len(prompt)} and an answer of up to {header.max_tokens} tokens"
            return f"{problem} are more than this model's {engine.max_tokens}", index
        if int(prompt.max()) >= engine.vocab_size:
            return f"token id {int(prompt.max())} is not below this model's vocab_size {engine.vocab_size}", index
    return None
