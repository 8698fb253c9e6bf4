"""Ask a teacher for its description, scores of sequences, answers and its LM head, and learn whether it is alive.

    ZmqTeacher     a model of the teacher server                       gkd.scoring.teacher.client
    HttpTeacher    a model of a vLLM or SGLang server                  gkd.scoring.teacher.http_client

Scoring endpoints, `gkd generate` and the checks before a start know this interface alone, and get a
teacher from `open_teacher`. Teachers in a pool of the run (`TeacherBackend.pool`) answer no requests: their processes
score a whole batch in one call (`gkd.actor.frozen.pools.LocalScoring`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, Unpack

import numpy as np

from gkd.config.schema_teacher import HTTP, TeacherConfig
from gkd.scoring.teacher.client import ZmqTeacher
from gkd.scoring.teacher.info import Probe, TeacherArgs, TeacherInfo
from gkd.types import Rollout, TeacherHealth, TeacherScores
from teacher_server.client.client import OnScored
from teacher_server.client.generate import AnswerSettings, NamedPrompt
from teacher_server.wire.protocol import Signal


class Teacher(Protocol):
    """One teacher. Thread-safe. Methods and futures raise TeacherUnavailable, or another TeacherError."""

    def info(self) -> TeacherInfo:
        """Return the description. Blocks."""

    def submit(
        self, rollouts: Sequence[Rollout], signals: Sequence[Signal], *, mass: float = 0.0
    ) -> Future[list[TeacherScores]]:
        """Request the scores of several sequences, which costs little more than one sequence's.

        The first error of a sequence ends the request. Futures complete in the order in which requests are scored;
        cancelling one cancels its request at the teacher.

        Args:
            rollouts: as many as `Window.n_per_request` allows, one for hidden and logits; either all have `top_ids`, or
                none has. The teacher reads all tokens, and returns rows for the own ones.
            signals: `gkd.config.schema.Derived.signals`: "topk" (each row lists the rollout's `top_ids`, if there are
                any), "sampled" (the logprob of each own token), both, "hidden" (final hidden states; their product
                with `lm_head` is the logits, not yet divided by the temperature), or "logits" (divided by the
                temperature; the maximum of each row is 0). Shapes and dtypes: see `TeacherScores`.
            mass: list only as many of the top-k entries as needed to reach this probability; 0 = all k.
        """

    def generate(self, prompts: Sequence[NamedPrompt], settings: AnswerSettings) -> Future[list[np.ndarray]]:
        """Let the teacher write answers: the ids of each, [R] int32, those of one prompt after the other.

        Raises TeacherError: a value exceeds the limits of the protocol. The future raises it, too, if the teacher
        writes no answers.
        """

    def lm_head(self) -> np.ndarray:
        """Return the LM head, [V, H] float32: logits = hidden states @ lm_head.T. Blocks."""

    def health(self) -> TeacherHealth:
        """Return what has been heard from the teacher."""

    def close(self) -> None:
        """Fail all pending requests and close, without waiting for the teacher. Idempotent."""


def open_teacher(
    teacher: TeacherConfig,
    *,
    probe: Probe | None = None,
    on_scored: OnScored | None = None,
    units: np.ndarray | None = None,
    **args: Unpack[TeacherArgs],
) -> Teacher:
    """Return the teacher that these settings name.

    Args:
        probe: expected weights of an HTTP server, see `HttpTeacher`.
        on_scored: called with each reply of a teacher server and the number of sequences that are complete with it.
        units: [V'] int32, the unit of each of the teacher's tokens: a teacher server lists `n_vocab` units.

    Raises:
        ConfigError: teacher.server_ip, teacher.keys or teacher.api_key_env cannot be used.
    """
    if teacher.backend == HTTP:
        from gkd.scoring.teacher.http_client import HttpTeacher  # imports aiohttp

        return HttpTeacher(teacher, probe=probe, **args)
    return ZmqTeacher(teacher, on_scored=on_scored, units=units, **args)
