"""The experts of a rollout engine: computed from, and read back from, the weights that a sync can write.

vLLM keeps all experts of a layer in two parameters of its `RoutedExperts`, each rank a share of every expert's MLP
columns: w13_weight [E, 2 * I / tp, H], gate rows and then up rows, and w2_weight [E, H, I / tp].

On CPU it packs both for its kernel and throws the originals away, so a later `load_weights` would write into a
packed matrix. Packing and kernel are replaced by plain matrix products, as for linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from gkd.errors import ModelError


def keep_cpu_experts_live() -> None:
    """Compute CPU experts from their parameters instead of packed copies. Call it before a model is built."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def keep(self: Any, layer: torch.nn.Module) -> None:
        """The parameters stay as they were loaded."""

    for name, replacement in (("process_weights_after_loading", keep), ("apply", _plain_experts)):
        getattr(CPUUnquantizedExperts, name)  # an upgrade that renames it must not pass unnoticed
        setattr(CPUUnquantizedExperts, name, replacement)


def _plain_experts(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: MoEActivation,
    global_num_experts: int,
    expert_map: Tensor | None,
    *_: Any,
    apply_router_weight_on_input: bool,
    **__: Any,
) -> None:
    """Fills `output` [T, H] with each token's experts, weighted and summed, in float32."""
    if activation != MoEActivation.SILU or expert_map is not None or apply_router_weight_on_input:
        raise ModelError(f"experts on CPU: {activation} with expert_map {expert_map is not None} is not supported")
    total = torch.zeros_like(output, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        token, place = torch.where(topk_ids == expert)
        gate, up = linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
        answer = linear(silu(gate) * up, w2[expert])
        total.index_add_(0, token, answer.float() * topk_weights[token, place, None])
    output.copy_(total)


def expert_tensors(
    prefix: str, module: RoutedExperts, gather: Callable[[Tensor, int], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of a layer's experts, one at a time.

    Args:
        prefix: the module's name in the model.
        gather: joins the shares of all tensor-parallel ranks along a dimension.
    """
    if module.use_ep:
        raise ModelError(f"{prefix}: the engine's experts are spread over ranks (enable_expert_parallel)")
    for expert, (w13, w2) in enumerate(zip(module.w13_weight, module.w2_weight, strict=True)):
        gate, up = w13.chunk(2)
        for part, share, dim in (("gate_proj", gate, 0), ("up_proj", up, 0), ("down_proj", w2, 1)):
            yield _name(prefix, expert, part), gather(share, dim)


def expert_names(prefix: str, module: RoutedExperts) -> list[str]:
    """The Hugging Face names of what `expert_tensors` yields."""
    parts = ("gate_proj", "up_proj", "down_proj")
    return [_name(prefix, expert, part) for expert in range(len(module.w13_weight)) for part in parts]


def _name(prefix: str, expert: int, part: str) -> str:
    return f"{prefix.removesuffix('.routed_experts')}.{expert}.{part}.weight"
