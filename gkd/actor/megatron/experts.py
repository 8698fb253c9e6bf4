"""Configure Megatron's mixture-of-experts layer to compute the same as the HF one.

Every expert is a plain MLP that is whole on its rank; tokens reach it by all-to-all. No token is dropped, even if many
choose the same expert, so padding cannot displace real tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.autograd.function import once_differentiable

from gkd.actor.megatron.layout import ParallelLayout
from gkd.hf.model_dims import ModelDims


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
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
    }


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
