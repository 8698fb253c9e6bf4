"""Builds this rank's part of the student: a Megatron GPTModel with the weights of a HF folder.

Letters: B sequences, S padded length, H hidden size, N selected rows, V_local padded vocabulary / TP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gkd.actor.megatron.attention import CausalSdpaAttention
from gkd.actor.megatron.experts import expert_settings
from gkd.actor.megatron.hf_config import HfDims, read_hf_dims
from gkd.actor.megatron.hf_load import load_hf_weights
from gkd.actor.megatron.hf_mapping import held_entries
from gkd.actor.megatron.layout import ParallelLayout
from gkd.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class StudentGPT(GPTModel):
    """GPTModel whose last stage goes only as far as the loss asks for.

    Prompt and padding positions carry no loss, and [S, B, V] logits of theirs are the largest
    tensor of a step; the rows are selected from the hidden states before the LM head. The head itself
    may be left to the loss.
    """

    _rows: Tensor | None = None
    _want_logits = True

    def forward(
        self, tokens: Tensor, position_ids: Tensor, rows: Tensor | None = None, want_logits: bool = True
    ) -> Tensor:
        """One stage's forward pass.

        Args:
            tokens: [B, S] int64, right-padded.
            position_ids: [B, S] int64. Unused by rotary embeddings, which count columns.
            rows: [N] int64 into the flattened [B * S] positions; None for all of them, in that order.
            want_logits: False: the last stage ends before its LM head.

        Returns:
            [N, V_local] logits or [N, H] hidden states on the last stage, [S, B, H] hidden states on the others.
        """
        self._rows, self._want_logits = rows, want_logits
        try:
            output: Tensor = super().forward(tokens, position_ids, attention_mask=None)
        finally:
            self._rows, self._want_logits = None, True
        return output.flatten(0, 1) if self.post_process else output

    @property
    def lm_head(self) -> Tensor:
        """[V_local, H] this rank's rows of the LM head; last stage only."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.post_process and self._rows is not None:
            length, n_sequences, _ = hidden_states.shape  # [S, B, H]: position-major, unlike `rows`
            position_major = self._rows % length * n_sequences + self._rows // length
            hidden_states = hidden_states.flatten(0, 1).index_select(0, position_major)[:, None]  # [N, 1, H]
        if self.post_process and not self._want_logits:
            return hidden_states if self._rows is not None else hidden_states.transpose(0, 1)
        output: Tensor = super()._postprocess(hidden_states, *args, **kwargs)
        return output


@dataclass(frozen=True, slots=True)
class StudentModel:
    """This rank's stage of the student and where it stands; what import and export work on."""

    gpt: StudentGPT
    dims: HfDims
    layout: ParallelLayout
    groups: ProcessGroupCollection

    def named_params(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(Megatron name, parameter) of this stage, each once."""
        yield from self.gpt.named_parameters()

    @property
    def vocab_start(self) -> int:
        """Global id of the first vocabulary row of this TP rank."""
        return self.layout.tp_rank * (self.layout.padded_vocab_size(self.dims) // self.layout.tp)


def torch_dtype(name: str) -> torch.dtype:
    """Raises ConfigError naming model.dtype if the student cannot be trained in it."""
    if name not in _DTYPES:
        raise ConfigError("model.dtype", name, "is not a training dtype.", f"Choose one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def build_model(
    model_path: str | Path,
    layout: ParallelLayout,
    groups: ProcessGroupCollection,
    *,
    dtype: torch.dtype,
    device: torch.device,
    recompute: bool = False,
) -> StudentModel:
    """Builds this rank's stage and fills it from the HF folder `model_path`.

    Args:
        dtype: of parameters and activations; gradients and optimizer states are float32 anyway.
        recompute: recompute every layer in the backward pass instead of keeping its activations.

    Raises:
        ModelError: unsupported or damaged folder. ConfigError: the layout cannot split this model.
    """
    dims = read_hf_dims(model_path)
    layout.check_model(dims)
    config = transformer_config(dims, layout, dtype=dtype, device=device, recompute=recompute)
    gpt = StudentGPT(
        config=config,
        transformer_layer_spec=_layer_spec(config),
        vocab_size=layout.padded_vocab_size(dims),
        max_sequence_length=dims.max_positions,
        pre_process=layout.is_first_stage,
        post_process=layout.is_last_stage,
        share_embeddings_and_output_weights=dims.tied_embeddings,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    gpt.to(device=device, dtype=dtype)  # Megatron leaves the norms in float32
    gpt.rotary_pos_emb.inv_freq = torch.tensor(dims.rope_inv_freq, dtype=torch.float32, device=device)
    params = dict(gpt.named_parameters())
    load_hf_weights(model_path, params, dims, layout)
    _mark_shards(params, dims, layout)
    return StudentModel(gpt=gpt, dims=dims, layout=layout, groups=groups)


def _mark_shards(params: Mapping[str, torch.nn.Parameter], dims: HfDims, layout: ParallelLayout) -> None:
    """Tells Megatron which parameters TP cuts, and which belong to experts.

    Those without the first mark count on TP rank 0 only in the gradient norm; Megatron sets it while it initialises a
    weight, which this project skips. Those with the second are reduced over the ranks that hold the same expert and get
    an optimizer of their own. Megatron sets it for EP > 1 only; with EP = 1 it makes the optimizer's checkpoint of the
    same kind, so that one layout can resume the other.
    """
    for entry in held_entries(dims, layout):
        param: Any = params[entry.param]
        if entry.layout.partition_dim is not None:
            param.tensor_model_parallel = True
            param.partition_dim = entry.layout.partition_dim
            param.partition_stride = 1
        if entry.owner is not None:
            param.allreduce = False


def transformer_config(
    dims: HfDims, layout: ParallelLayout, *, dtype: torch.dtype, device: torch.device, recompute: bool
) -> TransformerConfig:
    """Megatron's configuration of a RMSNorm + SwiGLU + rotary decoder, dense or with experts."""
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
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Micro-batches differ in S. Megatron asks for this dispatcher then, dense model or not.
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",
        # Sums of token losses now, one division by the global number of tokens in finalize_model_grads.
        calculate_per_token_loss=True,
        # Weights come from the HF folder, so random initialisation would be thrown away.
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        # Fusions need CUDA extensions (apex, Transformer Engine) or torch.compile.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _layer_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layers with this project's attention in each."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CausalSdpaAttention
    return spec
