"""Count the parameters of LoRA adapters, which are trained instead of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from gkd.config.schema import Config
from gkd.errors import ConfigError
from gkd.hf.model_dims import ModelDims

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_SPLIT_INPUTS = ("o_proj", "down_proj")  # TP splits their inputs, and the outputs of the others


def adapter_params(config: Config, dims: ModelDims, layers: Sequence[int], tp: int = 1) -> int:
    """Return the parameters of the adapters of these layers on one of `tp` tensor-parallel ranks.

    Experts have none. On fsdp2 those of a layer are one tensor, not linear layers.

    Raises:
        ConfigError: actor.lora.targets names a layer that a known architecture does not have, or layers of experts on
            Megatron.
    """
    lora, h, f = config.actor.lora, dims.hidden_size, dims.ffn_size
    if lora.rank == 0:
        return 0
    sides = {  # inputs, outputs
        "q_proj": (h, dims.q_columns),
        "k_proj": (h, dims.kv_columns),
        "v_proj": (h, dims.kv_columns),
        "o_proj": (dims.q_columns, h),
        "gate_proj": (h, f),
        "up_proj": (h, f),
        "down_proj": (f, h),
    }
    dense = [layer for layer in range(dims.n_layers) if not dims.is_moe_layer(layer)]
    if dims.moe is not None and not config.actor.backend.adapts_moe_models:
        dense = []
    total = 0
    for target in lora.targets:
        name = target.rpartition(".")[2]
        own = [layer for layer in layers if name in _ATTENTION or layer in dense]
        if dims.is_exact and (name not in sides or not (name in _ATTENTION or dense)):
            problem = f"a {dims.model_type} model has no linear layer named {target} that gets an adapter."
            fix = f"choose among {', '.join(sides if dense else _ATTENTION)}."
            raise ConfigError("actor.lora.targets", lora.targets, problem, fix)
        n_in, n_out = sides.get(name, (h, f))
        total += len(own) * (n_in // tp + n_out if name in _SPLIT_INPUTS else n_in + n_out // tp)
    return lora.rank * total
