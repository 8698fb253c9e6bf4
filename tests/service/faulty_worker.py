"""A worker that misbehaves on demand: `python -m tests.service.faulty_worker --broker HOST:PORT --model PATH`.

Reads kinds of faults from stdin, a line each. For each it joins as a new worker, does honest work,
does the fault once, and is gone (excluded, or by its own leave). Says `did KIND` on stdout then.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from teacher_server.config.settings import ONLY_TEACHER
from teacher_server.engines.load import EngineSettings, load_engine
from teacher_server.wire.protocol import MAX_FRAME_BYTES, ScoreReply, checksum, replies
from teacher_server.worker.compute import Worker
from teacher_server.worker.link import WorkerLink
from teacher_server.worker.model_folder import inspect_model_folder
from tests.service.messages import make_hello

_HONEST_FIRST = 2  # answers before the fault

Frames = list[Any]


def _edit(frames: Frames, change: Callable[[ScoreReply], None]) -> Frames:
    header = replies.decode(frames[0])
    assert isinstance(header, ScoreReply)
    change(header)
    return [replies.encode(header), *frames[1:]]


def nan(frames: Frames) -> Frames:
    logprobs = np.frombuffer(frames[1], np.uint8).copy()
    logprobs[:] = 0xFF  # every float of it a NaN
    frames = [frames[0], logprobs.data, *frames[2:]]
    return _edit(frames, lambda header: header.checksums.__setitem__(0, checksum(frames[1])))


def flipped(frames: Frames) -> Frames:
    ids = np.frombuffer(frames[2], np.uint8).copy()
    ids[len(ids) // 2] ^= 4
    return [*frames[:2], ids.data, *frames[3:]]


def flipped_header(frames: Frames) -> Frames:
    raw = bytearray(frames[0])
    raw[-3] ^= 1
    return [bytes(raw), *frames[1:]]


def wrong_digest(frames: Frames) -> Frames:
    return _edit(frames, lambda header: setattr(header, "token_digest", os.urandom(16)))


def wrong_model(frames: Frames) -> Frames:
    return _edit(frames, lambda header: setattr(header, "model_fingerprint", "another"))


def truncated(frames: Frames) -> Frames:
    return frames[:-1]


EDITS = {
    function.__name__: function for function in (nan, flipped, flipped_header, wrong_digest, wrong_model, truncated)
}
KINDS = (*EDITS, "swapped", "doubled", "oversize", "garbage")


class FaultyLink(WorkerLink):
    """Does `kind` once, in the place of an answer."""

    kind = ""
    n_answers = 0
    held: tuple[bytes, Frames] | None = None

    def answer(self, job_id: bytes, frames: Sequence[Any], *, final: bool = True) -> None:
        if not isinstance(replies.decode(frames[0]), ScoreReply):  # rows of a stream, or an error
            super().answer(job_id, frames, final=final)
            return
        self.n_answers += 1
        if self.n_answers <= _HONEST_FIRST or not self.kind:
            super().answer(job_id, frames, final=final)
        elif self.kind == "swapped":
            if self.held is None:
                self.held = (job_id, list(frames))
                return
            other, other_frames = self.held
            self._did()
            super().answer(other, frames)
            super().answer(job_id, other_frames)
        elif self.kind == "doubled":
            self._did()
            super().answer(job_id, frames)
            super().answer(job_id, frames)
            self.leave()
        elif self.kind == "oversize":
            self._did()
            super().answer(job_id, [*frames[:-1], bytes(MAX_FRAME_BYTES + 1)])  # cuts the connection
            self.leave()
        elif self.kind == "garbage":
            self._did()
            self._outbox_in.send_multipart([os.urandom(60), os.urandom(5)])
        else:
            edit = EDITS[self.kind]
            self._did()
            super().answer(job_id, edit(list(frames)))

    def _did(self) -> None:
        print(f"did {self.kind}", flush=True)
        self.kind = ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--broker", required=True)
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    folder = inspect_model_folder(args.model, needs_weights=False)
    engine = load_engine(
        EngineSettings(
            model=folder.path,
            engine="trivial",
            device="cpu",
            dtype="float32",
            tensor_parallel_size=1,
            threads=1,
            max_tokens=folder.max_tokens,
            max_batch_tokens=8192,
            gpu_memory_utilization=0.9,
        )
    )
    for number, line in enumerate(sys.stdin):
        name = f"faulty-{os.getpid()}-{number}"
        hello = make_hello(
            name=name,
            teacher=ONLY_TEACHER,
            host=socket.gethostname(),
            pid=os.getpid(),
            model_name=folder.name,
            model_path=folder.path,
            model_fingerprint=folder.fingerprint,
            tokenizer_fingerprint="",
            vocab_size=engine.vocab_size,
            hidden_size=engine.hidden_size,
            max_tokens=folder.max_tokens,
            credit_tokens=16384,
        )
        link = FaultyLink(f"tcp://{args.broker}", hello)
        link.kind = line.strip()
        Worker(engine, link, folder.fingerprint, name, 8192).run()
        link.close()
        print("gone", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
