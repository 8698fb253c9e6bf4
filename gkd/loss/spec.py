"""Which loss a run trains on, and how it is evaluated on one micro-batch's rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from gkd.errors import ConfigError
from gkd.loss.divergence import Tail, divergence_named


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The part of the `distill` section that the student needs. Checked when it is made."""

    name: str = "forward_kl"  # a key of gkd.loss.divergence.DIVERGENCES
    tail: Tail = "bucket"  # what stands for the tokens outside the teacher's top-k
    temperature: float = 1.0  # divides the student's logits; the teacher scored at the same one

    def __post_init__(self) -> None:
        divergence_named(self.name)
        if self.tail not in get_args(Tail):
            choices = ", ".join(get_args(Tail))
            raise ConfigError("distill.tail", self.tail, "is not a tail policy.", f"Choose one of {choices}.")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(
                "teacher.temperature", self.temperature, "must be a positive number.", "Use 1.0 for the plain softmax."
            )

    def per_token(self, topk_logprobs_student: Tensor, topk_logprobs_teacher: Tensor) -> Tensor:
        """[N, K] student and teacher logprobs -> [N] losses, nats."""
        return divergence_named(self.name)(topk_logprobs_student, topk_logprobs_teacher, self.tail)
