"""Which models can be cut into which parts: by the Megatron actor's ranks, and by an engine's. Pure."""

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
    """Raises ConfigError naming actor.ep: it does not divide the ranks of a pipeline stage."""
    if ranks_of_stage % ep:
        raise ConfigError(
            "actor.ep",
            ep,
            f"does not divide the {ranks_of_stage} ranks of a pipeline stage, over which experts are spread.",
            f"Choose a divisor of {ranks_of_stage}, or change the number of GPUs of the actor pool.",
        )


def check_actor_split(model: SplitModel, *, tp: int, pp: int, vpp: int, ep: int, sequence_parallel: bool) -> None:
    """Raises ConfigError naming the key of a size that cannot cut the model."""
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
            raise ConfigError("actor.ep", ep, f"the model ({model.model_type}) has no experts to spread.", "Use 1.")
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
    """Raises ConfigError where a rollout engine cannot cut the student over `tp` ranks; what is unknown is empty.

    Args:
        columns: of MLPs, by their kind.
    """
    for what, counts in {"attention heads": heads, **columns}.items():
        for count in counts:
            if count % tp:
                raise ConfigError("rollout.tp", tp, f"it does not divide the student's {count} {what}.", "lower it.")
    for count in kv_heads:
        if count % tp and tp % count:
            problem = f"it neither divides the student's {count} key/value heads nor is a multiple of them."
            raise ConfigError("rollout.tp", tp, problem, "lower it.")
