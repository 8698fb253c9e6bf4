"""Select the modules of a stage's layers, `actor.layers`: Megatron's local ones, or Transformer Engine's.

Both use this project's attention, so packed sequences are handled in one place.

A mixture-of-experts layer computes the same as the HF one. Every expert is a plain MLP that is whole on its rank;
tokens reach it by all-to-all. No token is dropped, even if many choose the same expert, so padding cannot displace real
tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.autograd.function import once_differentiable

from gkd.actor.common.attention import Scores, causal_attention
from gkd.actor.megatron.fused import split_heads
from gkd.actor.megatron.layout import ParallelLayout
from gkd.errors import ConfigError
from gkd.hf.model_dims import ModelDims, MoeDims

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
    config: TransformerConfig, dims: ModelDims, *, with_te: bool, chunk: int | None, fused: bool = False
) -> TransformerBlockSubmodules:
    """Return the modules of the layers of one model chunk.

    Args:
        with_te: use Transformer Engine's modules.
        chunk: index of the chunk on this pipeline stage; None without virtual pipeline stages.
        fused: compile what is between the products of an attention, and compute the experts of a rank together, where
            torch has such a product.
    """
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=with_te, normalization="RMSNorm", vp_stage=chunk)
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        mlp = layer.submodules.mlp.submodules
        attention.core_attention = CausalSdpaAttention
        kind: Any = ScaledQueries if dims.scales_queries else LocalAngles if dims.is_gemma else SelfAttention
        splits_fused = fused and not with_te and not dims.post_norm
        layer.submodules.self_attention.module = _FUSED_ATTENTION[kind] if splits_fused else kind
        if hasattr(mlp, "experts") and dims.moe is not None and dims.moe.groups is not None:
            mlp.router = partial(SigmoidRouter, moe=dims.moe)
        if not with_te:
            _use_rms_norm(layer.submodules, "input_layernorm", "pre_mlp_layernorm")
            _use_rms_norm(attention, "q_layernorm", "k_layernorm")
            if fused and hasattr(mlp, "experts") and _has_grouped_product(config):
                mlp.experts.module = GroupedExperts
        if dims.post_norm:
            _move_norms(layer.submodules, config)
        if dims.has_outer_norms:
            sizes = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
            layer.submodules.self_attn_bda = layer.submodules.mlp_bda = ModuleSpec(module=NormAndAdd, params=sizes)
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
    sizes = (config.hidden_size, config.moe_ffn_hidden_size)
    on_cuda = not config.use_cpu_initialization
    return not on_cuda or (config.params_dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes))


def _move_norms(layer: Any, config: TransformerConfig) -> None:
    """Take the norms before attention and MLP away, and compute those of heads over all of them."""
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    attention = layer.self_attention.submodules
    attention.q_layernorm = ModuleSpec(module=AllHeadsNorm, params={"n_heads": config.num_attention_heads})
    attention.k_layernorm = ModuleSpec(module=AllHeadsNorm, params={"n_heads": config.num_query_groups})


def _use_rms_norm(submodules: Any, *names: str) -> None:
    for name in names:
        if getattr(submodules, name) is not IdentityOp:
            setattr(submodules, name, RmsNorm)


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the attribute that makes Megatron sum its gradient over TP under sequence parallelism.

    Megatron's wrapper of the same torch module refuses `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self._adds_one = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., H]. 1 + weight would lose digits in bfloat16, so transformers computes it in float32."""
        if not self._adds_one:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class NormAndAdd(RmsNorm):
    """Replace Megatron's addition of a block's output to its input: normalize that output first."""

    def forward(self, *_: Any) -> Any:
        """Return the function that adds (output, bias) to the residual; the models that have it have no biases."""
        return lambda output, residual, dropout: residual + super(NormAndAdd, self).forward(output[0])


class AllHeadsNorm(torch.nn.Module):
    """RMSNorm of all queries, or keys, of a token together, of which this rank has some heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, n_heads: int) -> None:
        super().__init__()
        self._width = n_heads * hidden_size
        self._eps = eps
        self.weight = torch.nn.Parameter(torch.empty(self._width // config.tensor_model_parallel_size))

    def forward(self, values: Tensor) -> Tensor:
        """Normalize [S, B, heads, D]. The sum over TP is the same on all ranks, and so is its gradient."""
        total = values.float().square().sum(dim=(-2, -1), keepdim=True)
        total = mappings.reduce_from_tensor_model_parallel_region(total)
        total = mappings.copy_to_tensor_model_parallel_region(total)
        normed = values.float() * torch.rsqrt(total / self._width + self._eps)
        return (normed * self.weight.view(*values.shape[-2:])).to(values.dtype)


class CausalSdpaAttention(MegatronModule):
    """Replace Megatron's `DotProductAttention` in a causal decoder without attention dropout.

    Megatron's local attention materializes [B * heads, S, S] scores and refuses packed sequences. Its other one
    needs Transformer Engine. This one runs on CPU and CUDA.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self._group = getattr(pg_collection, "cp", None)
        window = 1 + config.window_size[0] if _has_window(config, layer_number) else None
        self._scores = Scores(softmax_scale, window)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Compute attention of [S, B, heads, D] queries and [S, B, kv_heads, D] keys and values: [S, B, heads * D].

        Args:
            packed_seq_params: boundaries of packed sequences (B = 1); None: each row is one sequence.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("CausalSdpaAttention supports only the causal mask; pass neither a mask nor a bias")
        pack = packed_seq_params or PackedSeqParams()
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [B, heads, S, D]
        context = causal_attention(
            q, k, v, pack.cu_seqlens_q, max_length=pack.max_seqlen_q, scores=self._scores, group=self._group
        )
        return context.permute(2, 0, 1, 3).flatten(2)


def _has_window(config: TransformerConfig, layer_number: int) -> bool:
    """Return whether a layer, counted from 1 over the whole model, has a sliding window."""
    return is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)


class LocalAngles(SelfAttention):
    """The attention of Gemma 3: the second half of the angles' columns is that of layers with a window."""

    def forward(self, hidden_states: Tensor, *, rotary_pos_emb: Any, **options: Any) -> Any:
        """See Megatron's. All layers use the same halves, which are kept, for `rotate` keeps a table with each."""
        if not hasattr(rotary_pos_emb, "gkd_halves"):
            rotary_pos_emb.gkd_halves = rotary_pos_emb.chunk(2, dim=-1)
        layer_rope = rotary_pos_emb.gkd_halves[_has_window(self.config, self.layer_number)]
        return super().forward(hidden_states, rotary_pos_emb=layer_rope, **options)


class ScaledQueries(SelfAttention):
    """The attention of Ministral 3: the last column of the angles scales the queries.

    It is a part of the angles, so that a layer that is recomputed has the scales of its own micro-batch.
    """

    def forward(self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, **options: Any) -> Any:
        """See Megatron's."""
        self._scale = rotary_pos_emb[..., -1:]  # [S, 1, 1, 1]
        return super().forward(hidden_states, rotary_pos_emb=rotary_pos_emb[..., :-1], **options)

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> Any:
        """See Megatron's. Scaling before the rotation is the same as after it."""
        query, *key_value = super().get_query_key_value_tensors(*args, **options)
        return query * self._scale.to(query.dtype), *key_value


class FusedAttention(SelfAttention):
    """Megatron's attention, with `split_heads` between its first product and the scores."""

    def forward(self, hidden_states: Tensor, *, rotary_pos_emb: Any, **options: Any) -> Any:
        """See Megatron's."""
        skips = self.config.no_rope_freq
        self._angles = None if skips and skips[self.layer_number - 1] else rotary_pos_emb
        return super().forward(hidden_states, rotary_pos_emb=None, **options)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """See Megatron's; queries and keys are rotated."""
        mixed, (n_columns, size, _) = super().get_query_key_value_tensors(hidden_states, split_qkv=False)
        return split_heads(
            mixed,
            self._angles,
            (getattr(self.q_layernorm, "weight", None), getattr(self.k_layernorm, "weight", None)),
            n_queries=n_columns // size,
            eps=self.config.layernorm_epsilon,
            adds_one=self.config.layernorm_zero_centered_gamma,
        )


class FusedLocalAngles(LocalAngles, FusedAttention):
    """Gemma 3's attention with `split_heads`."""


class FusedScaledQueries(ScaledQueries, FusedAttention):
    """Ministral 3's attention with `split_heads`. Scaling after the rotation is the same as before it."""


_FUSED_ATTENTION: dict[Any, Any] = {
    SelfAttention: FusedAttention,
    LocalAngles: FusedLocalAngles,
    ScaledQueries: FusedScaledQueries,
}


def expert_settings(dims: ModelDims, layout: ParallelLayout) -> dict[str, Any]:
    """Return the arguments of TransformerConfig for the experts; empty for a dense model."""
    if dims.moe is None:
        return {}
    if not hasattr(moe_utils, "te_general_gemm"):
        # Megatron's router reads this name, but defines it only if Transformer Engine is installed.
        moe_utils.te_general_gemm = None
    return {
        "num_moe_experts": dims.moe.n_experts,
        "moe_ffn_hidden_size": dims.moe.ffn_size,
        "moe_layer_freq": [int(is_moe) for is_moe in dims.moe.layers],
        "moe_router_topk": dims.moe.n_active,
        # A softmax over the chosen logits equals HF's over all of them, divided by the chosen ones' sum.
        "moe_router_pre_softmax": not dims.moe.normalize_weights,
        # bfloat16 probabilities of many experts would tie.
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "softmax" if dims.moe.groups is None else "sigmoid",
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": dims.shared_size or None,
        "moe_shared_expert_gate": dims.moe.shared_gate,
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
    }


class SigmoidRouter(TopKRouter):
    """The router of GLM-4.5: a bias and groups of experts choose, the scores alone are the weights.

    Megatron's own updates that bias, normalizes always, and counts other numbers of experts in the scores of groups.
    """

    def __init__(self, config: TransformerConfig, pg_collection: Any = None, *, moe: MoeDims) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._moe = moe
        self.correction_bias = torch.nn.Parameter(torch.zeros(moe.n_experts), requires_grad=False)

    def _apply(self, *args: Any, **options: Any) -> Any:
        super()._apply(*args, **options)
        self.correction_bias.data = self.correction_bias.data.float()  # in all models, like in transformers
        return self

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights of the experts and which of them compute, both [T, E], from float32 [S, B, E] logits."""
        scores = logits.flatten(0, 1).sigmoid()
        choice = scores.detach() + self.correction_bias
        assert self._moe.groups is not None
        n_groups, n_chosen = self._moe.groups
        of_group = choice.unflatten(1, (n_groups, -1)).topk(2, dim=-1)[0].sum(dim=-1)
        is_allowed = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, of_group.topk(n_chosen)[1], value=True)
        is_allowed = is_allowed.repeat_interleave(choice.shape[1] // n_groups, dim=1)
        chosen = choice.masked_fill(~is_allowed, -torch.inf).topk(self._moe.n_active)[1]
        routing_map = torch.zeros_like(is_allowed).scatter(1, chosen, value=True)
        weights = scores * routing_map
        if self._moe.normalize_weights:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return weights * self._moe.scale, routing_map


class GroupedExperts(SequentialMLP):
    """Compute the experts of a rank together: two grouped products instead of two products of each expert.

    The parameters are the same as in `SequentialMLP`.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Compute the experts' outputs, weighted with the router's probabilities.

        Args:
            permuted_local_hidden_states: [T, H], in the order of the experts.
            tokens_per_expert: [E] int64 counts, in host or device memory.
            permuted_probs: [T].

        Returns:
            [T, H], and None in place of a bias.
        """
        hidden = permuted_local_hidden_states
        if not len(hidden):
            output: Tensor = super().forward(hidden, tokens_per_expert, permuted_probs)[0]
            return output, None
        ends = tokens_per_expert.cumsum(0).to(hidden.device, torch.int32)
        inner = [expert.linear_fc1.weight for expert in self.local_experts]
        outer = [expert.linear_fc2.weight for expert in self.local_experts]
        projected = GroupedProduct.apply(hidden, ends, *inner)
        activated = weighted_bias_swiglu_impl(projected, None, permuted_probs.unsqueeze(-1), False)
        return GroupedProduct.apply(activated, ends, *outer), None


class GroupedProduct(torch.autograd.Function):
    """[T, K] rows times the transposed [N, K] weights of the experts that they belong to: [T, N].

    The product takes the weights as one tensor. That copy exists during a pass only; what is saved is the parameters.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        return F.grouped_mm(rows, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        of_rows = F.grouped_mm(grad, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return of_rows, None, *(None for _ in weights)
        return of_rows, None, *F.grouped_mm(grad.T, rows, offs=ends).unbind()
