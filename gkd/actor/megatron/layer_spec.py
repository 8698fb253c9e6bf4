"""Select the modules of a stage's layers, `actor.layers`: Megatron's local ones, or Transformer Engine's.

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
from gkd.actor.megatron.experts import GroupedExperts
from gkd.actor.megatron.norm import RmsNorm
from gkd.errors import ConfigError

# Transformer Engine fuses a norm with the following matrix and names its weight after that matrix.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def check_transformer_engine(device: torch.device) -> None:
    """Check that `actor.layers: te` works on this rank. The preflight has checked the import on the trainer's machine.

    Raises:
        ConfigError: the device is not CUDA, or Megatron-core could not import Transformer Engine.
    """
    if device.type != "cuda":
        raise ConfigError("actor.layers", "te", f"Transformer Engine has no kernels for {device.type}.", "use auto.")
    if not gpt_layer_specs.HAVE_TE:
        problem = "Megatron-core finds no Transformer Engine here that it can use."
        raise ConfigError("actor.layers", "te", problem, "install it for this torch, or use auto.")


def is_fused(layers: str, device: torch.device) -> bool:
    """Return whether elementwise operations of a layer are compiled to one kernel: on CUDA, unless layers is torch."""
    return device.type == "cuda" and layers != "torch"


def layer_spec(
    config: TransformerConfig, *, with_te: bool, chunk: int | None, fused: bool = False
) -> TransformerBlockSubmodules:
    """Return the modules of the layers of one model chunk.

    Args:
        with_te: use Transformer Engine's modules.
        chunk: index of the chunk on this pipeline stage; None without virtual pipeline stages.
        fused: compute the experts of a rank together, where torch has such a product.
    """
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=with_te, normalization="RMSNorm", vp_stage=chunk)
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalSdpaAttention
        if not with_te:
            _use_rms_norm(layer.submodules, "input_layernorm", "pre_mlp_layernorm")
            _use_rms_norm(attention, "q_layernorm", "k_layernorm")
            if fused and hasattr(layer.submodules.mlp.submodules, "experts") and _has_grouped_product(config):
                layer.submodules.mlp.submodules.experts.module = GroupedExperts
    if not with_te:
        _use_rms_norm(spec, "layer_norm")
    return spec


def local_name(param: str) -> str:
    """Return the name of a parameter in layers of local modules, which `hf_mapping` uses."""
    for fused, local in _FUSED_NORMS.items():
        if param.endswith(fused):
            return param.removesuffix(fused) + local
    return param


def _has_grouped_product(config: TransformerConfig) -> bool:
    """Return whether torch can multiply the experts' matrices together: on CUDA bfloat16 with rows of 16 bytes."""
    if not hasattr(torch.nn.functional, "grouped_mm"):  # an older torch
        return False
    sizes = (config.hidden_size, config.moe_ffn_hidden_size)
    on_cuda = not config.use_cpu_initialization
    return not on_cuda or (config.params_dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes))


def _use_rms_norm(submodules: Any, *names: str) -> None:
    for name in names:
        if getattr(submodules, name) is not IdentityOp:
            setattr(submodules, name, RmsNorm)
