"""What the trainer expects of any teacher, remote or local, and the check of what it says.

On the road of one batch: rollout -> *teacher score* -> micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from gkd.types import Rollout, TeacherTopK


@dataclass(frozen=True, slots=True)
class TeacherInfo:
    """Which model scores, and its limits; name and fingerprint are recorded in the run folder."""

    teacher: str  # its name among the server's teachers
    model_name: str
    model_path: str
    fingerprint: str  # of the weights' folder; differs between two checkpoints of one model
    vocab_size: int  # rows of the LM head, which may be more than the tokenizer has tokens
    hidden_size: int
    tokenizer_fingerprint: str  # see teacher_server.wire.protocol.tokenizer_fingerprint; empty: no tokenizer there
    max_tokens: int  # longest prompt + response
    n_workers: int
    n_streams: int  # sequences that its workers want in flight, all together
    engine: str
    device: str
    dtype: str
    protocol_version: int


class Teacher(Protocol):
    """Scores rollouts. Several threads may use it at once."""

    def info(self) -> TeacherInfo:
        """Raises TeacherUnavailable if the teacher cannot be asked."""
        ...

    def score(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[int, TeacherTopK]]:
        """(index into `rollouts`, its scores) in order of completion, each index exactly once.

        Raises:
            TeacherError: the teacher refused a sequence or sent scores that cannot be right.
            TeacherUnavailable: it stayed away for longer than its budget.
        """
        ...

    def close(self) -> None:
        """Release sockets or memory, in bounded time; may be called twice."""
        ...
