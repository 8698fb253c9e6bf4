"""Ask a teacher for its description, scores of sequences and its LM head, and learn whether it is alive.

    ZmqTeacher     a model of the teacher server                       gkd.scoring.teacher.client
    HttpTeacher    a model of a vLLM or SGLang server                  gkd.scoring.teacher.http_client

Scoring endpoints, and the checks before a start know this interface alone, and get a
teacher from `open_teacher`. Teachers in a pool of the run (`TeacherBackend.pool`) answer no requests: their processes
score a whole batch in one call (`gkd.actor.frozen.pools.LocalScoring`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from gkd.config.schema_teacher import HTTP, TeacherConfig
from gkd.scoring.teacher.client import ZmqTeacher
from gkd.scoring.teacher.info import Probe, TeacherInfo
from gkd.types import Rollout, TeacherHealth, TeacherScores
from teacher_server.client.client import OnScored
from teacher_server.wire.protocol import Signal


class Teacher(Protocol):
    """One teacher. Thread-safe. Methods and futures raise TeacherUnavailable, or another TeacherError."""

    def info(self) -> TeacherInfo:
        """Return the description. Blocks."""
        ...

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
        ...

    def lm_head(self) -> np.ndarray:
        """Return the LM head, [V, H] float32: logits = hidden states @ lm_head.T. Blocks."""
        ...

    def health(self) -> TeacherHealth:
        """Return what has been heard from the teacher."""
        ...

    def close(self) -> None:
        """Fail all pending requests and close, without waiting for the teacher. Idempotent."""
        ...


def open_teacher(
    teacher: TeacherConfig,
    *,
    k: int,
    n_vocab: int,
    n_in_flight: int,
    fingerprint: str = "",
    probe: Probe | None = None,
    outage_budget_s: float | None = None,
    on_scored: OnScored | None = None,
    units: np.ndarray | None = None,
) -> Teacher:
    """Return the teacher that these settings name.

    Args:
        k: top-k entries per response position.
        n_vocab: size of the common vocabulary. The teacher's rows are truncated to it and then normalized. 0 = all.
        n_in_flight: maximum number of requests at the teacher; others wait here.
        fingerprint: expected weights; scores of others raise TeacherError. Empty expects those of the first reply.
            Of an HTTP server it is the id of the model.
        probe: expected weights of an HTTP server, see `HttpTeacher`.
        outage_budget_s: replaces the setting.
        on_scored: called with each reply of a teacher server and the number of sequences that are complete with it.
        units: [V'] int32, the unit of each of the teacher's tokens: a teacher server lists `n_vocab` units.

    Raises:
        ConfigError: teacher.server_ip, teacher.keys or teacher.api_key_env cannot be used.
    """
    if teacher.backend == HTTP:
        from gkd.scoring.teacher.http_client import HttpTeacher  # imports aiohttp

        return HttpTeacher(
            teacher,
            k=k,
            n_vocab=n_vocab,
            n_in_flight=n_in_flight,
            model=fingerprint,
            probe=probe,
            outage_budget_s=outage_budget_s,
        )
    return ZmqTeacher(
        teacher,
        k=k,
        n_vocab=n_vocab,
        n_in_flight=n_in_flight,
        fingerprint=fingerprint,
        outage_budget_s=outage_budget_s,
        on_scored=on_scored,
        units=units,
    )
