"""Read the sizes and features of a model from its config.json, and build Megatron's TransformerConfig for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gkd.actor.megatron.fused import install_fused_rope
from gkd.actor.megatron.layer_spec import expert_settings
from gkd.actor.megatron.layout import ParallelLayout
from gkd.errors import ModelError
from gkd.hf.families import FAMILIES
from gkd.hf.model_dims import ModelDims, check_megatron_support, read_dims


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronDims(ModelDims):
    """Sizes of a supported model, and the constants of its norms and rotary embeddings."""

    norm_eps: float
    rope_inv_freq: tuple[float, ...]  # [rotated columns / 2] float32 values, rope scaling applied
    query_scale: tuple[float, int] | None = None  # llama_4_scaling_beta and the original context
    no_rope: tuple[bool, ...] = ()  # one per layer: True for those without; empty: every layer rotates
    has_window: tuple[bool, ...] = ()  # one per layer: True for those with sliding_window; empty: every layer has it
    local_inv_freq: tuple[float, ...] = ()  # rotations in layers with a window; empty: no others
    attention_scale: float | None = None  # factor of the scores; None: 1 / sqrt(D)


def read_megatron_dims(model_path: str | Path) -> MegatronDims:
    """Read config.json of a local HF folder through transformers, which fills in what the file leaves out.

    Raises:
        ModelError: the folder or its config is missing or unreadable, or it has an unsupported architecture or feature.
    """
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a HF model folder: it has no config.json. Fix: set model.path to a local one."
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{folder}/config.json cannot be read: {error}") from error
    config_json = config.to_dict()
    check_megatron_support(config_json, str(folder))
    dims = read_dims(config_json)
    family = FAMILIES[dims.model_type]
    rope = config.rope_parameters
    rotates = config.no_rope_layers[: dims.n_layers] if family.has_no_rope_layers else ()
    gemma_dims: dict[str, Any] = {}
    if dims.is_gemma:
        gemma_dims["has_window"] = tuple(kind == "sliding_attention" for kind in config.layer_types)
        gemma_dims["local_inv_freq"] = _rope_inv_freq(folder, config, dims.head_dim, "sliding_attention")
        gemma_dims["attention_scale"] = config.query_pre_attn_scalar**-0.5
    return MegatronDims(
        **{field.name: getattr(dims, field.name) for field in fields(dims)},
        norm_eps=config.rms_norm_eps,
        rope_inv_freq=_rope_inv_freq(folder, config, dims.head_dim, "full_attention" if dims.is_gemma else None),
        query_scale=(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
        if dims.scales_queries
        else None,
        no_rope=tuple(not layer for layer in rotates),
        **gemma_dims,
    )


def _rope_inv_freq(folder: Path, config: PretrainedConfig, head_dim: int, layer_type: str | None) -> tuple[float, ...]:
    """Return the [rotated columns / 2] rotations per position, radians. transformers computes the scaled kinds.

    Megatron's own llama3 scaling hard-codes three of the four numbers that a config may set.
    """
    # transformers 5 stores theta and scaling in rope_parameters, for old and new config files.
    rope: dict[str, Any] = dict(config.rope_parameters if layer_type is None else config.rope_parameters[layer_type])
    kind = rope.get("rope_type", "default")
    if kind == "default":
        n_rotated = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
        exponents = torch.arange(0, n_rotated, 2, dtype=torch.int64).float() / n_rotated
        inv_freq = 1.0 / (float(rope["rope_theta"]) ** exponents)
    else:
        inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type)
        if not math.isclose(attention_scaling, 1.0):
            raise ModelError(f"{folder}: rope_type {kind!r} scales attention by {attention_scaling}; not supported.")
    return tuple(inv_freq.tolist())


# actor.recompute -> Megatron's settings
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(
    dims: MegatronDims,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    device: torch.device,
    recompute: str,
    sequence_parallel: bool,
    fused: bool = False,
    adds_gradients: bool = True,
) -> TransformerConfig:
    """Return Megatron's configuration of a RMSNorm + gated MLP + rotary decoder, dense or with experts.

    Args:
        recompute, sequence_parallel: see `build_model`.
        fused: compile the MLP's activation and the rotary embedding to one kernel each.
        adds_gradients: let the product that computes a gradient add it to the sum, see `cpu_shim`.
    """
    if fused:
        install_fused_rope()
    # Megatron's compiled GELU is the tanh approximation, its plain one is not.
    gelu = F.gelu if fused else partial(F.gelu, approximate="tanh")
    return TransformerConfig(
        **expert_settings(dims, layout),
        num_layers=dims.n_layers,
        hidden_size=dims.hidden_size,
        ffn_hidden_size=dims.ffn_size,
        num_attention_heads=dims.n_heads,
        num_query_groups=dims.n_kv_heads,
        kv_channels=dims.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=dims.norm_eps,
        qk_layernorm=dims.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=dims.qkv_bias,
        gated_linear_unit=True,
        no_rope_freq=[int(skips) for skips in dims.no_rope] or None,
        activation_func=gelu if dims.is_gemma else F.silu,
        layernorm_zero_centered_gamma=dims.is_gemma,
        softmax_scale=dims.attention_scale,
        window_size=None if dims.sliding_window is None else (dims.sliding_window - 1, 0),
        window_attn_skip_freq=[int(has) for has in dims.has_window] or None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        sequence_parallel=sequence_parallel,
        # Interleaved stages send forward and backward at once. With batched sends and two stages (the next one is also
        # the previous one), a gradient would be received as an activation, and the model would train on it.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Micro-batches differ in S. Megatron then requires this dispatcher, also for dense models.
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",
        # Gradients of loss sums, divided once by the global number of tokens in finalize_model_grads.
        calculate_per_token_loss=True,
        # Weights come from the HF folder, so random initialization would be discarded.
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        **_RECOMPUTE[recompute],
        # These need torch.compile only. SwiGLU then saves its input instead of every intermediate result.
        bias_activation_fusion=fused,
        apply_rope_fusion=fused,
        gradient_accumulation_fusion=adds_gradients,
        # These need apex or Transformer Engine, or do nothing for a model without dropout and attention scores.
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


class PositionAngles(torch.nn.Module):
    """Replace Megatron's rotary embedding, which counts the columns of a row: the angles of any positions.

    Args:
        inv_freq: [D / 2] float32, rotations per position, radians.
        query_scale: see `MegatronDims`. The scale is one more column, which `ScaledQueries` reads.
        local_inv_freq: of layers with a window. Its angles are further columns, which `LocalAngles` reads.
    """

    positions: Tensor  # [S] of the current micro-batch's columns

    def __init__(
        self, inv_freq: Tensor, query_scale: tuple[float, int] | None = None, local_inv_freq: Sequence[float] = ()
    ) -> None:
        super().__init__()
        local = inv_freq.new_tensor(local_inv_freq)
        self._inv_freq = torch.cat((inv_freq, inv_freq, local, local))
        self._query_scale = query_scale

    def get_rotary_seq_len(self, *_: Any) -> int:
        return len(self.positions)

    def forward(self, *_: Any, **unused: Any) -> Tensor:
        """Return [S, 1, 1, D] float32; D + 1 columns with scales of queries, 2 D with local angles."""
        columns = [torch.outer(self.positions.to(torch.float32), self._inv_freq)]
        if self._query_scale is not None:
            beta, length = self._query_scale
            columns.append(1 + beta * torch.log(1 + torch.floor(self.positions[:, None] / length)))
        return torch.cat(columns, dim=-1)[:, None, None]
