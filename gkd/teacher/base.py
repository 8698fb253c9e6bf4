"""What the trainer expects of any teacher, remote or local, and the check of what it says.

On the road of one batch: rollout -> *teacher score* -> micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gkd.errors import TeacherError
from gkd.types import Rollout, TeacherTopK

MASS_SLACK = 1e-3  # what float16 logprobs may add to a row's probability mass


@dataclass(frozen=True, slots=True)
class TeacherInfo:
    """Which model scores, and its limits; name and fingerprint are recorded in the run folder."""

    model_name: str
    model_path: str
    fingerprint: str  # of the weights' folder; differs between two checkpoints of one model
    vocab_size: int  # rows of the LM head, which may be more than the tokenizer has tokens
    tokenizer_fingerprint: str  # see teacher_server.protocol.tokenizer_fingerprint; empty: no tokenizer there
    max_tokens: int  # longest prompt + response
    n_workers: int
    engine: str
    device: str
    protocol_version: int


class Teacher(Protocol):
    """Scores rollouts. One thread uses it."""

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


def validate_topk(scores: TeacherTopK, n_vocab: int, where: str, *, n_rows: int | None = None) -> None:
    """Refuse scores that no distribution over `n_vocab` tokens can have.

    Args:
        scores: [R, K] ids and logprobs.
        n_vocab: ids must be below it.
        where: names the sequence in the error, e.g. ``prompt 17, sample 2``.
        n_rows: the R expected, if known.

    Raises:
        TeacherError: wrong shape or dtype, NaN or infinity, an id out of range or twice in a row,
            logprobs not descending, or a row's mass above 1 + 1e-3.
    """
    ids, logprobs = scores.topk_ids, scores.topk_logprobs
    if ids.ndim != 2 or ids.shape != logprobs.shape or ids.size == 0 or (n_rows is not None and len(ids) != n_rows):
        expected = "[R, K]" if n_rows is None else f"[{n_rows}, K]"
        raise TeacherError(f"{where}: ids {ids.shape} and logprobs {logprobs.shape}, expected {expected} twice")
    if not np.issubdtype(ids.dtype, np.integer) or logprobs.dtype != np.float32:
        raise TeacherError(f"{where}: ids {ids.dtype} and logprobs {logprobs.dtype}, expected integers and float32")
    _refuse_rows(where, ~np.isfinite(logprobs).all(1), "a logprob is NaN or infinite")
    _refuse_rows(where, ((ids < 0) | (ids >= n_vocab)).any(1), f"a token id is outside [0, {n_vocab})")
    ordered = np.sort(ids, axis=1)
    _refuse_rows(where, (ordered[:, 1:] == ordered[:, :-1]).any(1), "a token id comes twice")
    _refuse_rows(where, (logprobs[:, 1:] > logprobs[:, :-1]).any(1), "logprobs do not descend")
    # A logprob far above 0 overflows to an infinite mass, which is refused like any other above 1.
    with np.errstate(over="ignore"):
        mass = np.exp(logprobs).sum(1)
    _refuse_rows(where, mass > 1 + MASS_SLACK, f"probability mass is up to {mass.max():.6g}, more than 1")


def _refuse_rows(where: str, bad: Any, problem: str) -> None:
    """`bad` is [R] bool."""
    if bad.any():
        raise TeacherError(f"{where}: response position {int(bad.argmax())} ({int(bad.sum())} in all): {problem}")
