"""Describe the loss of a run: names, weights and parameters of its terms. Does not import torch.

    loss of a token = sum over terms of  weight * term(token),   each term on the tokens it is defined for

Three kinds of terms:

    divergences       compare two distributions; on every response token; also functions of the user, by their path
    policy gradient   use the sampled token alone; on tokens that the student generated
    sft               cross-entropy; on tokens of the dataset's responses

In addition there may be a reference: reference_weight * KL(student || reference), a policy-gradient term (k3) with
the reference's logprob instead of the teacher's; and rewards: reward_weight * a clipped policy-gradient loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

from gkd.config.function_path import is_path
from gkd.config.schema import DistillConfig, LossTermConfig
from gkd.config.schema_teacher import DIVERGENCE_NAMES, DIVERGENCES, LOSS_NAMES, POLICY_GRADIENT_NAMES, SFT, Tail
from gkd.errors import ConfigError
from teacher_server.wire.protocol import Signal

REFERENCE_KL, REWARD = "reference_kl", "reward"  # names of these terms in reports
_PARAMETERS = ("beta", "alpha")


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of the loss. Raises ConfigError if a value is out of range."""

    name: str = "forward_kl"
    weight: float = 1.0
    beta: float = 0.5  # jsd: the teacher's share of the mixture, in (0, 1)
    alpha: float = 0.1  # skew_kl, skew_reverse_kl: share of the first distribution in the second, in [0, 1)

    def __post_init__(self) -> None:
        if self.name not in LOSS_NAMES and not is_path(self.name):
            fix = f"use one of {', '.join(LOSS_NAMES)}, or a function as package.module:function."
            raise ConfigError("distill.loss", self.name, "is not a known loss.", fix)
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(
                "distill.losses",
                self.weight,
                f"the weight of {self.name} must be a positive number.",
                "remove the term, or give it a positive weight.",
            )
        if not 0 < self.beta < 1:
            fix = "use a number between them, or the limits themselves: forward_kl for 0, reverse_kl for 1."
            raise ConfigError("distill.beta", self.beta, "must be inside (0, 1); the jsd is zero at both ends.", fix)
        if not 0 <= self.alpha < 1:
            raise ConfigError("distill.alpha", self.alpha, "must be in [0, 1).", "use e.g. 0.1; 0 is the plain KL.")


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Settings of the student's loss. Checked when created.

    Args:
        terms: at least one, each name once.
        tail: handling of the probability mass outside the teacher's top-k; unused with full distributions.
        temperature: divides the student's logits; the teacher scored at the same one.
        importance_clip: largest importance weight of the policy-gradient terms; 0 = no limit.
        reference_weight: weight of the KL to the reference; 0 = no reference.
        domains: names of the routes, see `gkd.config.routes`; empty: one teacher, whose numbers are those of the batch.
        temperatures: by route; empty: `temperature`.
        teacher_reward_scale: lambda of G-OPD, in the policy-gradient terms; 1 = no reference.
        reward_weight: weight of the policy-gradient loss of the rewards; 0 = none.
        reward_clip: (low, high), its ratio is limited to 1 - low and 1 + high.
        token_weight, token_share: factors of the tokens in training, see `gkd.loss.token_weights`.

    Raises:
        ConfigError: naming the invalid key of `distill` or `teacher`.
    """

    terms: tuple[LossTerm, ...] = (LossTerm(),)
    tail: Tail = "bucket"
    temperature: float = 1.0
    importance_clip: float = 2.0
    reference_weight: float = 0.0
    domains: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = ()
    teacher_reward_scale: float = 1.0
    reward_weight: float = 0.0
    reward_clip: tuple[float, float] = (0.2, 0.2)
    token_weight: str = "none"
    token_share: float = 1.0

    def __post_init__(self) -> None:
        names = [term.name for term in self.terms]
        if not names or len(set(names)) != len(names):
            problem = "names a loss twice." if names else "names no loss."
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
            raise ConfigError("distill.importance_clip", self.importance_clip, "must be 0 or at least 1.", fix)
        if not (math.isfinite(self.reference_weight) and self.reference_weight >= 0):
            problem, fix = "must be a number >= 0.", "use e.g. 0.1, or 0 for no reference."
            raise ConfigError("distill.reference_kl_weight", self.reference_weight, problem, fix)

        low, high = self.reward_clip
        if not (0 < low < 1 and 0 < high < math.inf):
            problem, fix = "must be two numbers > 0, the first below 1.", "use e.g. [0.2, 0.2]."
            raise ConfigError("distill.reward_clip", list(self.reward_clip), problem, fix)

    @property
    def has_rewards(self) -> bool:
        """Return whether the loss needs the advantage of each token."""
        return self.reward_weight > 0

    @property
    def has_reference(self) -> bool:
        """Return whether the loss needs the reference's logprobs."""
        return self.reference_weight > 0 or self.teacher_reward_scale != 1

    @property
    def has_temperatures(self) -> bool:
        """Return whether a route has a temperature of its own."""
        return any(each != self.temperature for each in self.temperatures)

    def in_evaluation(self) -> LossSpec:
        """Return the terms of an evaluation: those of the teacher, all tokens alike."""
        return replace(
            self,
            reference_weight=0.0,
            teacher_reward_scale=1.0,
            reward_weight=0.0,
            token_weight="none",
            token_share=1.0,
        )

    @property
    def uses_samples(self) -> bool:
        """Return whether a term is estimated from the tokens that the student generated."""
        return self.has_reference or self.has_residual or bool(self.policy_gradients)

    @property
    def has_residual(self) -> bool:
        """Return whether the sampled token corrects the tail of a divergence."""
        return self.tail == "residual" and bool(self.divergences)

    @property
    def divergences(self) -> tuple[LossTerm, ...]:
        return tuple(term for term in self.terms if term.name in DIVERGENCE_NAMES or is_path(term.name))

    @property
    def policy_gradients(self) -> tuple[LossTerm, ...]:
        return tuple(term for term in self.terms if term.name in POLICY_GRADIENT_NAMES)

    @property
    def sft(self) -> LossTerm | None:
        return next((term for term in self.terms if term.name == SFT), None)


def loss_spec(distill: DistillConfig, temperature: float) -> LossSpec:
    """Return the terms of `distill.losses`, or `distill.loss` if that list is empty. Raises ConfigError."""
    terms = [_term(i, entry, distill) for i, entry in enumerate(distill.losses)]
    if not terms:
        terms = [LossTerm(distill.loss, beta=distill.beta, alpha=distill.alpha)]
    tail: Tail = distill.tail  # type: ignore[assignment]  # LossSpec refuses anything else
    if len(distill.reward_clip) != 2:
        problem = "must be two numbers, for ratios below and above 1."
        raise ConfigError("distill.reward_clip", distill.reward_clip, problem, "use e.g. [0.2, 0.2].")
    return LossSpec(
        tuple(terms),
        tail,
        temperature,
        distill.importance_clip,
        distill.reference_kl_weight,
        teacher_reward_scale=distill.teacher_reward_scale,
        reward_weight=distill.reward_weight,
        reward_clip=(distill.reward_clip[0], distill.reward_clip[1]),
        token_weight=distill.token_weight,
        token_share=distill.token_share,
    )


def _term(i: int, entry: LossTermConfig, distill: DistillConfig) -> LossTerm:
    where = f"distill.losses[{i}]"
    own = _PARAMETERS if is_path(entry.name) else ()  # a function of the user may read both
    for key in _PARAMETERS:
        if getattr(entry, key) is not None and key not in DIVERGENCES.get(entry.name, own):
            fix = f"{key} belongs to {', '.join(name for name in DIVERGENCES if key in DIVERGENCES[name])}; remove it."
            raise ConfigError(f"{where}.{key}", getattr(entry, key), f"{entry.name!r} has no {key}.", fix)
    beta = distill.beta if entry.beta is None else entry.beta
    alpha = distill.alpha if entry.alpha is None else entry.alpha
    try:
        return LossTerm(entry.name, entry.weight, beta, alpha)
    except ConfigError as error:
        name = {"distill.loss": "name", "distill.losses": "weight"}.get(error.key, error.key.rpartition(".")[2])
        if name in _PARAMETERS and getattr(entry, name) is None:
            raise  # the value comes from distill.beta or distill.alpha
        raise ConfigError(f"{where}.{name}", error.value, error.problem, error.fix) from error


def teacher_signals(spec: LossSpec, signal: Signal) -> tuple[Signal, ...]:
    """Return the signals to request from the teacher for each sequence, in one request.

    The top-k may lack the sampled token, so divergences request both signals if policy gradients, a residual of the
    tail, or token_weight position need its logprob. Logits and hidden states contain both.
    """
    if signal == "topk" and (spec.policy_gradients or spec.has_residual or spec.token_weight == "position"):
        return ("topk", "sampled") if spec.divergences else ("sampled",)
    return (signal,)
