"""Build this rank's part of the student: Megatron GPTModels with the weights of a HF folder.

Letters: B sequences, S padded or packed length / CP, a multiple of TP under sequence parallelism, H hidden size,
N selected rows, V_local padded vocabulary / TP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gkd.actor.megatron.hf_mapping import TensorEntry, chunk_prefix, held_entries, load_hf_weights
from gkd.actor.megatron.layer_spec import check_transformer_engine, is_fused, layer_spec, local_name
from gkd.actor.megatron.layout import ParallelLayout
from gkd.actor.megatron.lora import Adapter, add_adapters, check_targets
from gkd.actor.megatron.model_config import MegatronDims, PositionAngles, read_megatron_dims, transformer_config
from gkd.config.schema_actor import LoraConfig
from gkd.data.columns import Columns
from gkd.log import get_logger


class StudentGPT(GPTModel):
    """GPTModel whose last stage computes only the selected rows, and optionally stops before the LM head.

    Prompt and padding positions carry no loss, but [S, B, V] logits would be the largest tensor of a step. So
    the rows are selected from the hidden states before the LM head, which may be left to the loss.
    """

    _position_major: Tensor | None = None
    _with_logits = True

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        rows: Tensor,
        cu_seqlens: Tensor | None = None,
        with_logits: bool = True,
    ) -> Tensor:
        """Run one chunk's forward pass.

        Args:
            tokens: [B, S] int64, right-padded or, with `cu_seqlens`, packed.
            position_ids: [B, S] int64, the same in all rows.
            rows: [N] int64 into the flattened [B * S] positions.
            cu_seqlens: [n + 1] int32 boundaries of the packed sequences, on the CPU; with CP those of the whole pack.
            with_logits: False: the last stage stops before its LM head.

        Returns:
            On the last chunk of the last stage [N, V_local] logits or [N, H] hidden states. Elsewhere [S, B, H] hidden
            states, or this rank's part of their positions under sequence parallelism.
        """
        n_sequences, length = tokens.shape
        self._position_major = rows % length * n_sequences + rows // length
        self._with_logits = with_logits
        self.rotary_pos_emb.positions = position_ids[0]
        try:
            output: Tensor = super().forward(
                tokens,
                position_ids,
                attention_mask=None,
                packed_seq_params=None if cu_seqlens is None else _packed_params(cu_seqlens, tokens.device),
            )
        finally:
            self._position_major = None
            self._with_logits = True
        return output

    @property
    def lm_head(self) -> Tensor:
        """This rank's rows of the LM head, [V_local, H]; last stage only."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        assert self._position_major is not None
        if self.config.sequence_parallel:
            # Each rank's gradient covers its vocabulary rows; the backward pass of this gather sums them, once.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self.pg_collection.tp)
        hidden_states = hidden_states.flatten(0, 1).index_select(0, self._position_major)  # [N, H]
        if not self._with_logits:
            return hidden_states
        if self.config.sequence_parallel:  # output_layer would gather again
            return F.linear(hidden_states, self.lm_head)
        output: Tensor = super()._postprocess(hidden_states[:, None], *args, **kwargs)  # [1, N, V_local]
        return output.flatten(0, 1)


def _packed_params(cu_seqlens: Tensor, device: torch.device) -> PackedSeqParams:
    """Return the boundaries that Megatron passes to `CausalSdpaAttention`.

    The format is not "thd": Megatron then treats the pack as a batch of one row, which it is but for attention.
    """
    longest = int(cu_seqlens.diff().max())
    return PackedSeqParams(cu_seqlens_q=cu_seqlens.to(device, non_blocking=True), max_seqlen_q=longest)


@dataclass(frozen=True, slots=True)
class StudentModel:
    """This rank's stage of the student with its layout and groups; import and export use it."""

    chunks: tuple[StudentGPT, ...]  # layout.vpp of them, in the order in which a micro-batch passes them
    dims: MegatronDims
    layout: ParallelLayout
    groups: ProcessGroupCollection
    adapters: tuple[Adapter, ...] = ()  # adapters of this stage
    lora: LoraConfig | None = None  # settings of the adapters

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield (name, module) of this stage; names are prefixes of the names of `named_params`."""
        for number, chunk in enumerate(self.chunks):
            for name, module in chunk.named_modules():
                yield chunk_prefix(self.layout, number) + name, module

    def named_params(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield (name as in `stage_entries`, parameter) of this stage, each once."""
        for number, chunk in enumerate(self.chunks):
            for name, param in chunk.named_parameters():
                yield chunk_prefix(self.layout, number) + local_name(name), param

    def trained_entries(self) -> list[TensorEntry]:
        """Return the entries of the parameters that this rank holds and trains."""
        if self.adapters:
            return [entry for adapter in self.adapters for entry in (adapter.a, adapter.b)]
        return held_entries(self.dims, self.layout)

    @property
    def config(self) -> TransformerConfig:
        config: TransformerConfig = self.chunks[0].config
        return config

    @property
    def columns(self) -> Columns:
        """The columns of a micro-batch that this rank computes."""
        group = self.groups.cp if self.layout.cp > 1 else None
        return Columns(group, self.layout.tp if self.config.sequence_parallel else 1)

    @property
    def device(self) -> torch.device:
        return next(self.chunks[0].parameters()).device

    @property
    def lm_head(self) -> Tensor:
        """This rank's rows of the LM head, [V_local, H]; last stage only."""
        return self.chunks[-1].lm_head


def build_model(
    model_path: str | Path,
    layout: ParallelLayout,
    groups: ProcessGroupCollection,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layers: str = "auto",
    recompute: str = "none",
    sequence_parallel: bool = False,
    lora: LoraConfig | None = None,
    seed: int = 0,
    on_phase: Callable[[str], None],
) -> StudentModel:
    """Build this rank's stage and fill it from the HF folder `model_path`.

    Args:
        dtype: of parameters and activations; gradients and optimizer states are always float32.
        layers: auto | torch | te: modules of the layers, see the key actor.layers.
        recompute: none | selective | full: activations that the backward pass recomputes instead of storing them.
        sequence_parallel: split activations along the sequence over TP where TP does not split them otherwise.
        lora: freeze the weights and train these adapters. With None all weights are trained.
        seed: of the adapters' first values.
        on_phase: called with the name of each start-up phase.

    Raises:
        ModelError: the folder is unsupported or damaged.
        ConfigError: the layout cannot split this model, it cannot have these adapters, or `layers` cannot be used here.
    """
    dims = read_megatron_dims(model_path)
    layout.check_model(dims, sequence_parallel=sequence_parallel, layers=layers)
    if lora is not None:
        check_targets(dims, lora)
    with_te = layers == "te"
    fused = is_fused(layers, device)
    if with_te:
        check_transformer_engine(device)
    config = transformer_config(
        dims,
        layout,
        dtype=dtype,
        device=device,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        fused=fused,
        adds_gradients=not with_te,
    )
    kind = "Transformer Engine's" if with_te else "Megatron's local ones"
    get_logger(f"actor.{layout.rank}").info("layers: %s%s", kind, ", compiled" if fused else "")
    on_phase("building the model")
    chunks = []
    for number in range(layout.vpp):
        vp_stage = number if layout.vpp > 1 else None
        chunk = StudentGPT(
            config=config,
            transformer_layer_spec=layer_spec(config, dims, with_te=with_te, chunk=vp_stage, fused=fused),
            vocab_size=layout.padded_vocab_size(dims),
            max_sequence_length=dims.max_positions,
            pre_process=layout.holds_embedding(number),
            post_process=layout.holds_head(number),
            share_embeddings_and_output_weights=dims.tied_embeddings,
            position_embedding_type="rope",
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        chunk.to(device=device, dtype=dtype)  # Megatron leaves the norms in float32
        inv_freq = torch.tensor(dims.rope_inv_freq, dtype=torch.float32, device=device)
        chunk.rotary_pos_emb = PositionAngles(inv_freq, dims.query_scale, dims.local_inv_freq)
        if dims.is_gemma and chunk.pre_process:
            scale = float(torch.tensor(dims.hidden_size**0.5, dtype=dtype))  # rounded, like in transformers
            chunk.embedding.register_forward_hook(lambda module, args, output, scale=scale: output * scale)
        chunks.append(chunk)
    model = StudentModel(chunks=tuple(chunks), dims=dims, layout=layout, groups=groups)
    params = dict(model.named_params())
    on_phase("loading weights")
    load_hf_weights(model_path, params, dims, layout)
    if lora is not None:
        for chunk in chunks:
            chunk.requires_grad_(False)
            if chunk.config.recompute_granularity == "full" and chunk.pre_process:
                # A recomputed layer has a backward pass only if its input needs a gradient.
                chunk.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
        adapters = add_adapters(dict(model.named_modules()), dims, layout, lora, seed)
        model = replace(model, adapters=tuple(adapters), lora=lora)
    _mark_shards(dict(model.named_params()), model.trained_entries())
    return model


def _mark_shards(params: Mapping[str, torch.nn.Parameter], entries: Sequence[TensorEntry]) -> None:
    """Mark for Megatron the parameters that TP splits and the experts' parameters.

    Parameters without the first mark count only on TP rank 0 in the gradient norm. Megatron sets it when it initializes
    a weight, which this project skips. Parameters with the second mark are reduced over the ranks that hold the same
    expert and get a separate optimizer, also with EP = 1.
    """
    for entry in entries:
        param: Any = params[entry.param]
        if entry.layout.partition_dim is not None:
            param.tensor_model_parallel = True
            param.partition_dim = entry.layout.partition_dim
            param.partition_stride = 1
        if entry.owner is not None:
            param.allreduce = False
