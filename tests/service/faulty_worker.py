"""A worker that injects faults: `python -m tests.service.faulty_worker --broker HOST:PORT --model PATH`.

Reads kinds of faults from stdin, one per line. For each it joins as a new worker, sends some valid replies,
injects the fault once, prints `did KIND` on stdout, and exits (excluded, or by leaving).
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs

from teacher_server.config.settings import ONLY_TEACHER
from teacher_server.engines.load import EngineSettings, load_engine
from teacher_server.wire.protocol import MAX_FRAME_BYTES, ScoreReply, checksum, replies
from teacher_server.worker.compute import Worker
from teacher_server.worker.link import MakeFrames, WorkerLink
from teacher_server.worker.model_folder import inspect_model_folder
from tests.service.harness import TRIVIAL
from tests.service.messages import make_hello

_N_VALID = 2  # valid replies before the fault

Frames = list[Any]


def _edit(frames: Frames, **changes: Any) -> Frames:
    header = replies.decode(frames[0])
    assert isinstance(header, ScoreReply)
    return [replies.encode(structs.replace(header, **changes)), *frames[1:]]


def nan(frames: Frames) -> Frames:
    logprobs = np.frombuffer(frames[1], np.uint8).copy()
    logprobs[:] = 0xFF  # every float becomes a NaN
    frames = [frames[0], logprobs.data, *frames[2:]]
    return _edit(frames, checksums=[checksum(frame) for frame in frames[1:]])


def flipped(frames: Frames) -> Frames:
    ids = np.frombuffer(frames[2], np.uint8).copy()
    ids[len(ids) // 2] ^= 4
    return [*frames[:2], ids.data, *frames[3:]]


def flipped_header(frames: Frames) -> Frames:
    raw = bytearray(frames[0])
    raw[-3] ^= 1
    return [bytes(raw), *frames[1:]]


def wrong_digest(frames: Frames) -> Frames:
    return _edit(frames, token_digest=os.urandom(16))


def wrong_model(frames: Frames) -> Frames:
    return _edit(frames, model_fingerprint="another")


def truncated(frames: Frames) -> Frames:
    return frames[:-1]


EDITS = {
    function.__name__: function for function in (nan, flipped, flipped_header, wrong_digest, wrong_model, truncated)
}
KINDS = (*EDITS, "swapped", "doubled", "oversize", "garbage")


class FaultyLink(WorkerLink):
    """Inject the fault `kind` once, in place of a reply."""

    kind = ""
    n_replies = 0
    held: tuple[bytes, Frames] | None = None

    def _send(self, job_id: bytes, frames: Sequence[Any], *, final: bool = True) -> None:
        super().send_reply(job_id, lambda: frames, final=final)

    def send_reply(self, job_id: bytes, make: MakeFrames, *, final: bool = True) -> None:
        frames = list(make())
        if not isinstance(replies.decode(frames[0]), ScoreReply):  # rows of a stream, or an error
            self._send(job_id, frames, final=final)
            return
        self.n_replies += 1
        if self.n_replies <= _N_VALID or not self.kind:
            self._send(job_id, frames, final=final)
            return
        if self.kind == "swapped" and self.held is None:
            self.held = (job_id, frames)
            return
        kind, self.kind = self.kind, ""
        print(f"did {kind}", flush=True)
        if kind == "swapped":
            other, other_frames = self.held
            self._send(other, frames)
            self._send(job_id, other_frames)
        elif kind == "doubled":
            self._send(job_id, frames)
            self._send(job_id, frames)
            self.leave()
        elif kind == "oversize":
            self._send(job_id, [*frames[:-1], bytes(MAX_FRAME_BYTES + 1)])  # closes the connection
            self.leave()
        elif kind == "garbage":
            self._outbox.put((os.urandom(60), lambda: [os.urandom(5)]))
            self._outbox_in.send(b"")
        else:
            self._send(job_id, EDITS[kind](frames))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--broker", required=True)
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    folder = inspect_model_folder(args.model, needs_weights=False)
    engine = load_engine(
        EngineSettings(model=folder.path, max_tokens=folder.max_tokens, engine=TRIVIAL[1], device="cpu")
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
