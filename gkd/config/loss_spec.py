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

from dataclasses import dataclass, replace
from typing import cast

from gkd.config.declare import is_path
from gkd.config.schedule import Points, value_at
from gkd.config.schema_teacher import (
    DIVERGENCE_NAMES,
    DIVERGENCES,
    POLICY_GRADIENT_NAMES,
    SFT,
    DistillConfig,
    LossTermConfig,
    Tail,
)
from gkd.errors import ConfigError
from teacher_server.wire.protocol import Signal

# Names of these terms in reports.
REFERENCE_KL = "reference_kl"
REWARD = "reward"
_PARAMETERS = ("beta", "alpha")


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of the loss."""

    name: str = "forward_kl"
    weight: float = 1.0
    beta: float = 0.5  # jsd: the teacher's share of the mixture, in (0, 1)
    alpha: float = 0.1  # skew_kl, skew_reverse_kl: share of the first distribution in the second, in [0, 1)


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Settings of the student's loss. `loss_spec` checks them.

    Args:
        terms: at least one, each name once.
        tail: handling of the probability mass outside the teacher's top-k; unused with full distributions.
        temperature: divides the student's logits; the teacher scored at the same one.
        importance_clip: largest importance weight of the policy-gradient terms; 0 = no limit.
        reference_weight: weight of the KL to the reference; 0 = no reference.
        domains: names of the routes, see `gkd.config.schema`; empty: one teacher, whose numbers are those of the batch.
        turns: turns of a trajectory that have numbers of their own; later ones count as the last. 0: none has.
        temperatures: by route; empty: `temperature`.
        teacher_reward_scale: lambda of G-OPD, in the policy-gradient terms; 1 = no reference.
        reward_weight: weight of the policy-gradient loss of the rewards; 0 = none.
        reward_clip: (low, high), its ratio is limited to 1 - low and 1 + high.
        token_weight, token_share: factors of the tokens in training, see `gkd.loss.token_weights`.
        token_clip: largest value of a token's divergences, and of |log q - log p| in policy gradients, nats; 0 = none.
        schedules: name of a term, or `REWARD` -> points of its weight, see `at`. A term with weight 0 is left out.
        compares_texts: the teacher has another tokenizer, see `gkd.loss.text_units`.
    """

    terms: tuple[LossTerm, ...] = (LossTerm(),)
    tail: Tail = "bucket"
    temperature: float = 1.0
    importance_clip: float = 2.0
    reference_weight: float = 0.0
    domains: tuple[str, ...] = ()
    turns: int = 0
    temperatures: tuple[float, ...] = ()
    teacher_reward_scale: float = 1.0
    reward_weight: float = 0.0
    reward_clip: tuple[float, float] = (0.2, 0.2)
    token_weight: str = "none"
    token_share: float = 1.0
    token_clip: float = 0.0
    compares_texts: bool = False
    schedules: tuple[tuple[str, Points], ...] = ()

    def at(self, step: int) -> LossSpec:
        """Return the terms with their weights of a step, counted from 0."""
        weights = {name: value_at(points, step) for name, points in self.schedules}
        terms = tuple(replace(term, weight=weights.get(term.name, term.weight)) for term in self.terms)
        return replace(self, terms=terms, reward_weight=weights.get(REWARD, self.reward_weight))

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
        return any(value != self.temperature for value in self.temperatures)

    def in_evaluation(self) -> LossSpec:
        """Return the terms of an evaluation: those of the teacher, all tokens alike."""
        return replace(
            self,
            reference_weight=0.0,
            teacher_reward_scale=1.0,
            reward_weight=0.0,
            token_weight="none",
            token_share=1.0,
            token_clip=0.0,
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
    def used(self) -> tuple[LossTerm, ...]:
        return tuple(term for term in self.terms if term.weight)

    @property
    def divergences(self) -> tuple[LossTerm, ...]:
        return tuple(term for term in self.used if term.name in DIVERGENCE_NAMES or is_path(term.name))

    @property
    def policy_gradients(self) -> tuple[LossTerm, ...]:
        return tuple(term for term in self.used if term.name in POLICY_GRADIENT_NAMES)

    @property
    def sft(self) -> LossTerm | None:
        return next((term for term in self.used if term.name == SFT), None)


def loss_spec(distill: DistillConfig, temperature: float) -> LossSpec:
    """Return the terms of `distill.losses`, or `distill.loss` if that list is empty.

    Raises:
        ConfigError: a loss is named twice, or has a parameter that it does not use.
    """
    terms = [_term(i, entry, distill) for i, entry in enumerate(distill.losses)]
    names = [term.name for term in terms]
    if len(set(names)) != len(names):
        raise ConfigError("distill.losses", names, "names a loss twice.", "name each loss once.")
    return LossSpec(
        tuple(terms or [LossTerm(distill.loss, beta=distill.beta, alpha=distill.alpha)]),
        cast(Tail, distill.tail),
        temperature,
        distill.importance_clip,
        distill.reference_kl_weight,
        teacher_reward_scale=distill.teacher_reward_scale,
        reward_weight=distill.reward_weight,
        reward_clip=cast(tuple[float, float], tuple(distill.reward_clip)),
        token_weight=distill.token_weight,
        token_share=distill.token_share,
        token_clip=distill.token_clip,
    )


def _term(i: int, entry: LossTermConfig, distill: DistillConfig) -> LossTerm:
    where = f"distill.losses[{i}]"
    user_keys = _PARAMETERS if is_path(entry.name) else ()  # a function of the user may read both
    for key in _PARAMETERS:
        if getattr(entry, key) is not None and key not in DIVERGENCES.get(entry.name, user_keys):
            fix = f"{key} belongs to {', '.join(name for name in DIVERGENCES if key in DIVERGENCES[name])}; remove it."
            raise ConfigError(f"{where}.{key}", getattr(entry, key), f"{entry.name!r} has no {key}.", fix)
    beta = distill.beta if entry.beta is None else entry.beta
    alpha = distill.alpha if entry.alpha is None else entry.alpha
    return LossTerm(entry.name, entry.weight, beta, alpha)


def teacher_signals(spec: LossSpec, signal: Signal) -> tuple[Signal, ...]:
    """Return the signals to request from the teacher for each sequence, in one request.

    The top-k may lack the sampled token, so divergences request both signals if policy gradients, a residual of the
    tail, or token_weight position need its logprob; or texts, to know what else could stand in its place. Logits and
    hidden states contain both.
    """
    if signal == "topk" and spec.compares_texts:
        return ("topk", "sampled")
    if signal == "topk" and (spec.policy_gradients or spec.has_residual or spec.token_weight == "position"):
        return ("topk", "sampled") if spec.divergences else ("sampled",)
    return (signal,)
