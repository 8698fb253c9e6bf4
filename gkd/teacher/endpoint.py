"""The Ray surface of one scoring endpoint: asks the teacher for one data-parallel group, on that group's host.

It has no GPU and loads no torch: tokens come from the object store, go to the teacher over ZMQ, and the scores go back
into the object store of this host, where the group's last pipeline stage maps them without a copy.
"""

from __future__ import annotations

import numpy as np
import ray

from gkd.config import Config
from gkd.roles import RolloutChunk, ScoredChunk
from gkd.teacher.base import validate_topk
from gkd.teacher.client import ZmqTeacher
from gkd.types import Rollout, TeacherTopK


class ScoringEndpoint:
    """One data-parallel group's way to the teacher.

    Args:
        config: the run's settings.
        n_vocab: ids that student and teacher have in common; the teacher's other rows are cut before it normalises.
        n_in_flight: sequences kept at the server by this endpoint.
    """

    def __init__(self, config: Config, n_vocab: int, n_in_flight: int) -> None:
        teacher = config.teacher
        self._n_vocab = n_vocab
        self._teacher = ZmqTeacher(
            teacher.server_ip,
            teacher.server_port,
            k=teacher.topk,
            temperature=teacher.temperature,
            n_vocab=n_vocab,
            n_in_flight=n_in_flight,
            request_timeout_s=teacher.request_timeout_s,
            outage_budget_s=teacher.outage_budget_s,
            wire=teacher.wire,
        )

    def score(self, chunk: RolloutChunk) -> ScoredChunk:
        """Blocks until every sequence of the chunk is scored and checked."""
        rollouts: list[Rollout] = ray.get(chunk.ref)
        scores: list[TeacherTopK | None] = [None] * len(rollouts)
        for index, score in self._teacher.score(rollouts):
            where = f"prompt {rollouts[index].prompt_id}, sample {rollouts[index].sample_index}"
            validate_topk(score, self._n_vocab, where)
            scores[index] = score
        complete = [score for score in scores if score is not None]
        assert len(complete) == len(rollouts), "the client returned without an answer for each sequence"
        mass = [float(np.exp(s.topk_logprobs, dtype=np.float64).sum()) for s in complete]
        return ScoredChunk(
            rollouts=chunk,
            ref=ray.put(complete),
            teacher_mass=sum(mass) / chunk.n_response_tokens,
            n_teacher_bytes=sum(s.topk_ids.nbytes + s.topk_logprobs.nbytes for s in complete),
        )
