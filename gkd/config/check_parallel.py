"""Check that a model can be split over the ranks of the Megatron actor, and over an engine's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gkd.errors import ConfigError


class SplitModel(Protocol):
    """The sizes that ranks divide among themselves, as `gkd.hf.model_dims.ModelDims` has them."""

    @property
    def model_type(self) -> str: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def dense_ffn_size(self) -> int:
        """Columns of the MLPs without experts; 0 if there are none."""
        ...

    @property
    def n_experts(self) -> int:
        """0: a dense model."""
        ...


def check_expert_ranks(ep: int, ranks_of_stage: int) -> None:
    """Raise ConfigError if actor.ep does not divide the ranks of a pipeline stage."""
    if ranks_of_stage % ep:
        raise ConfigError(
            "actor.ep",
            ep,
            f"does not divide the {ranks_of_stage} ranks of a pipeline stage, which share the experts.",
            f"Choose a divisor of {ranks_of_stage}, or change the number of GPUs of the actor pool.",
        )


def check_actor_split(model: SplitModel, *, tp: int, pp: int, vpp: int, ep: int, sequence_parallel: bool) -> None:
    """Raise ConfigError naming the parallel size that does not divide the model."""
    _check_experts(model, tp, ep, sequence_parallel)
    for what, count in (
        ("attention heads", model.n_heads),
        ("key/value heads", model.n_kv_heads),
        ("MLP columns", model.dense_ffn_size),
    ):
        if count % tp:
            raise ConfigError(
                "actor.tp", tp, f"does not divide the model's {count} {what}.", f"Choose a divisor of {count}."
            )
    if model.n_layers % pp:
        raise ConfigError(
            "actor.pp",
            pp,
            f"does not divide the model's {model.n_layers} layers.",
            f"Choose a divisor of {model.n_layers}.",
        )
    if model.n_layers % (pp * vpp):
        raise ConfigError(
            "actor.vpp",
            vpp,
            f"actor.pp * actor.vpp = {pp} * {vpp} does not divide the model's {model.n_layers} layers.",
            f"Choose a divisor of {model.n_layers // pp}.",
        )


def _check_experts(model: SplitModel, tp: int, ep: int, sequence_parallel: bool) -> None:
    if not model.n_experts:
        if ep > 1:
            raise ConfigError("actor.ep", ep, f"the model ({model.model_type}) has no experts.", "Use 1.")
        return
    if model.n_experts % ep:
        raise ConfigError(
            "actor.ep",
            ep,
            f"does not divide the model's {model.n_experts} experts.",
            f"Choose a divisor of {model.n_experts}.",
        )
    if tp > 1 and not sequence_parallel:
        raise ConfigError(
            "actor.sequence_parallel",
            False,
            f"a mixture of experts with actor.tp > 1 needs actor.sequence_parallel=true (actor.tp is {tp}).",
            "Set it, or use actor.tp=1 and actor.ep.",
        )


def check_engine_split(
    tp: int, heads: Sequence[int], kv_heads: Sequence[int], columns: Mapping[str, Sequence[int]]
) -> None:
    """Raise ConfigError if `tp` ranks of an engine cannot split the student. Unknown counts are empty.

    Args:
        columns: columns of the MLPs, by kind.
    """
    for what, counts in {"attention heads": heads, **columns}.items():
        for count in counts:
            if count % tp:
                raise ConfigError(
                    "rollout.tp", tp, f"does not divide the student's {count} {what}.", f"use a divisor of {count}."
                )
    for count in kv_heads:
        if count % tp and tp % count:
            problem = f"is neither a divisor nor a multiple of the student's {count} key/value heads."
            raise ConfigError("rollout.tp", tp, problem, "lower it.")
