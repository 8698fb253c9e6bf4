"""Select the modules of a stage's layers: Transformer Engine's on CUDA if installed, else Megatron's local ones.

Both use this project's attention, so packed sequences are handled in one place.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from gkd.actor.megatron.attention import CausalSdpaAttention

# Transformer Engine fuses a norm with the following matrix and names its weight after that matrix.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the attribute that makes Megatron sum its gradient over TP under sequence parallelism.

    Megatron's wrapper of the same torch module refuses `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def use_transformer_engine(device: torch.device) -> bool:
    """Return whether Transformer Engine is installed and has kernels for `device`."""
    return device.type == "cuda" and bool(gpt_layer_specs.HAVE_TE)


def layer_spec(config: TransformerConfig, *, with_te: bool, chunk: int | None) -> TransformerBlockSubmodules:
    """Return the modules of the layers of one model chunk.

    Args:
        with_te: use Transformer Engine's modules, see `use_transformer_engine`. Adapters need the local ones: TE's
            matrices include the preceding norm, so the adapters would not get their input.
        chunk: index of the chunk on this pipeline stage; None without virtual pipeline stages.
    """
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=with_te, normalization="RMSNorm", vp_stage=chunk)
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalSdpaAttention
        if not with_te:
            _use_rms_norm(layer.submodules, "input_layernorm", "pre_mlp_layernorm")
            _use_rms_norm(attention, "q_layernorm", "k_layernorm")
    if not with_te:
        _use_rms_norm(spec, "layer_norm")
    return spec


def local_name(param: str) -> str:
    """Return the name of a parameter in layers of local modules, which `hf_mapping` uses."""
    for fused, local in _FUSED_NORMS.items():
        if param.endswith(fused):
            return param.removesuffix(fused) + local
    return param


def _use_rms_norm(submodules: Any, *names: str) -> None:
    for name in names:
        if getattr(submodules, name) is not IdentityOp:
            setattr(submodules, name, RmsNorm)
