"""Which loss a run trains on: names, weights and parameters. No torch here, so a config can be checked without it.

    loss of a token = sum over terms of  weight * term(token),   each term on the tokens it is defined for

Three kinds of terms:

    divergences       compare two distributions; on every response token
    policy gradient   use the sampled token alone; on tokens that the student wrote
    sft               cross-entropy; on tokens of the dataset's responses

Beside them there may be a reference: reference_weight * KL(student || reference), a policy-gradient term (k3) with
another model's logprob in the place of the teacher's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from gkd.config.schema import DistillConfig, LossTermConfig
from gkd.config.schema_teacher import DIVERGENCE_NAMES, LOSS_NAMES, POLICY_GRADIENT_NAMES, SFT, Tail
from gkd.errors import ConfigError
from teacher_server.wire.protocol import Signal

REFERENCE_KL = "reference_kl"  # the term beside the losses, in reports
_PARAMETERS = {"beta": ("jsd",), "alpha": ("skew_kl", "skew_reverse_kl")}  # who uses them


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One loss of a mixture. Raises ConfigError if a value is out of range."""

    name: str = "forward_kl"
    weight: float = 1.0
    beta: float = 0.5  # jsd: the teacher's share of the mixture, in (0, 1)
    alpha: float = 0.1  # skew_kl, skew_reverse_kl: share of the first distribution in the second, in [0, 1)

    def __post_init__(self) -> None:
        if self.name not in LOSS_NAMES:
            raise ConfigError("distill.loss", self.name, "is not a known loss.", f"use one of {', '.join(LOSS_NAMES)}.")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(
                "distill.losses",
                self.weight,
                f"the weight of {self.name} must be a positive number.",
                "remove the term, or weigh it.",
            )
        if not 0 < self.beta < 1:
            fix = "use a number between the two, or forward_kl for the limit at 0, reverse_kl for the one at 1."
            raise ConfigError("distill.beta", self.beta, "it is not inside (0, 1), where the jsd is not zero.", fix)
        if not 0 <= self.alpha < 1:
            raise ConfigError("distill.alpha", self.alpha, "it is not in [0, 1).", "use e.g. 0.1; 0 is the plain KL.")


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The part of the settings that the student's loss needs. Checked when it is made.

    Args:
        terms: at least one, each name once.
        tail: what stands for the tokens outside the teacher's top-k; no meaning where all tokens are there.
        temperature: divides the student's logits; the teacher scored at the same one.
        importance_clip: largest importance weight of the policy-gradient terms; 0 = no limit.
        reference_weight: of the KL to a reference; 0 = there is none.

    Raises:
        ConfigError: names the key of `distill` or `teacher` that is wrong.
    """

    terms: tuple[LossTerm, ...] = (LossTerm(),)
    tail: Tail = "bucket"
    temperature: float = 1.0
    importance_clip: float = 2.0
    reference_weight: float = 0.0

    def __post_init__(self) -> None:
        names = [term.name for term in self.terms]
        if not names or len(set(names)) != len(names):
            problem = "it names no loss." if not names else "it names a loss twice."
            raise ConfigError("distill.losses", names, problem, "name each loss once.")
        if self.tail not in get_args(Tail):
            raise ConfigError(
                "distill.tail", self.tail, "is not a tail policy.", f"use one of {', '.join(get_args(Tail))}."
            )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(
                "teacher.temperature", self.temperature, "must be a positive number.", "1.0 is the plain softmax."
            )
        if not (self.importance_clip == 0 or 1 <= self.importance_clip < math.inf):
            fix = "use e.g. 2.0, or 0 for no limit."
            raise ConfigError("distill.importance_clip", self.importance_clip, "it is neither 0 nor at least 1.", fix)
        if not (math.isfinite(self.reference_weight) and self.reference_weight >= 0):
            problem, fix = "it must be a number of 0 or more.", "use e.g. 0.1, or 0 for no reference."
            raise ConfigError("distill.reference_kl_weight", self.reference_weight, problem, fix)

    @property
    def has_reference(self) -> bool:
        return self.reference_weight > 0

    @property
    def uses_samples(self) -> bool:
        """Is a term of it estimated from the tokens that the student wrote?"""
        return self.has_reference or bool(self.policy_gradients)

    @property
    def divergences(self) -> tuple[LossTerm, ...]:
        return tuple(term for term in self.terms if term.name in DIVERGENCE_NAMES)

    @property
    def policy_gradients(self) -> tuple[LossTerm, ...]:
        return tuple(term for term in self.terms if term.name in POLICY_GRADIENT_NAMES)

    @property
    def sft(self) -> LossTerm | None:
        return next((term for term in self.terms if term.name == SFT), None)


def loss_spec(distill: DistillConfig, temperature: float) -> LossSpec:
    """`distill.losses`, or the one loss `distill.loss` where that list is empty. Raises ConfigError."""
    terms = [_term(i, entry, distill) for i, entry in enumerate(distill.losses)]
    if not terms:
        terms = [LossTerm(distill.loss, beta=distill.beta, alpha=distill.alpha)]
    tail: Tail = distill.tail  # type: ignore[assignment]  # LossSpec refuses anything else
    return LossSpec(tuple(terms), tail, temperature, distill.importance_clip, distill.reference_kl_weight)


def _term(i: int, entry: LossTermConfig, distill: DistillConfig) -> LossTerm:
    where = f"distill.losses[{i}]"
    for key, users in _PARAMETERS.items():
        if getattr(entry, key) is not None and entry.name not in users:
            fix = f"{key} belongs to {', '.join(users)}; remove it."
            raise ConfigError(f"{where}.{key}", getattr(entry, key), f"{entry.name!r} has no {key}.", fix)
    beta = distill.beta if entry.beta is None else entry.beta
    alpha = distill.alpha if entry.alpha is None else entry.alpha
    try:
        return LossTerm(entry.name, entry.weight, beta, alpha)
    except ConfigError as error:
        name = {"distill.loss": "name", "distill.losses": "weight"}.get(error.key, error.key.rpartition(".")[2])
        if name in _PARAMETERS and getattr(entry, name) is None:
            raise  # the one that all terms share is wrong
        raise ConfigError(f"{where}.{name}", error.value, error.problem, error.fix) from error


def teacher_signals(spec: LossSpec, signal: Signal) -> tuple[Signal, ...]:
    """What has to be asked of the teacher for each sequence.

    A top-k table may lack the sampled token, so a mixture of both kinds of terms asks for both, at twice the teacher's
    work; logits and hidden states hold everything.
    """
    if signal == "topk" and spec.policy_gradients:
        return ("topk", "sampled") if spec.divergences else ("sampled",)
    return (signal,)
