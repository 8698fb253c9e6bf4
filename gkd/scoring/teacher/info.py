"""Describe a teacher: its model and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NotRequired, TypedDict


class Probe(NamedTuple):
    """Identify the weights behind an HTTP server, which sends no digest of them."""

    token_ids: tuple[int, ...]  # [N]
    logprobs: tuple[float, ...]  # [N - 1], nats, of the tokens from the second one on
    noise: float  # nats by which they differ among other requests


@dataclass(frozen=True, slots=True)
class TeacherInfo:
    """Model and limits of a teacher; name and fingerprint are recorded in the run folder."""

    teacher: str  # its name among the server's teachers
    model_name: str
    model_path: str
    fingerprint: str  # fingerprint of the model folder; differs between checkpoints of a model
    vocab_size: int  # rows of the LM head; may exceed the number of tokens
    hidden_size: int
    tokenizer_fingerprint: str  # see teacher_server.wire.fingerprint; empty without a tokenizer
    max_tokens: int  # maximum prompt + response length
    n_workers: int
    n_streams: int  # recommended number of sequences in flight, sum over its workers
    engine: str
    device: str
    dtype: str
    is_server: bool  # a teacher server, which takes several sequences in a request
    template_fingerprint: str = ""  # fingerprint of its chat template; empty if it has none or it is not known
    template_example: str = (
        ""  # a prompt as its template writes it, sent by the server, at most 4,096 characters; may be empty
    )
    image_probe: Sequence[float] = ()  # numbers of its image processor; empty: it takes no images, or was not asked
    probe: Probe | None = None  # what proves the weights of an HTTP server

    @property
    def numerics(self) -> str:
        """Return what else than the weights its scores depend on."""
        return f"{self.engine} {self.dtype}"


class TeacherArgs(TypedDict):
    """Arguments with which every kind of teacher is opened."""

    k: int  # top-k entries per response position
    n_vocab: int  # the teacher's rows are truncated to these and then normalized; 0: all. HTTP: a limit of ids alone
    n_in_flight: int  # maximum number of requests at the teacher; others wait here
    # Expected weights; scores of others raise TeacherError. Empty: those of the first reply. HTTP: the id of the model.
    fingerprint: NotRequired[str]
    outage_budget_s: NotRequired[float | None]  # replaces the setting


def head_columns(teachers: Sequence[TeacherInfo]) -> tuple[list[int], int]:
    """Return the first column of each teacher's LM head where all heads are side by side, and the number of columns.

    Teachers with the same weights in the same precision share a head.
    """
    starts: dict[tuple[str, str], int] = {}
    n_columns = 0
    for teacher in teachers:
        if (teacher.fingerprint, teacher.dtype) not in starts:
            starts[teacher.fingerprint, teacher.dtype] = n_columns
            n_columns += teacher.hidden_size
    return [starts[teacher.fingerprint, teacher.dtype] for teacher in teachers], n_columns
