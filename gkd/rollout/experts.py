"""Mixture-of-experts layers of a rollout engine: keep their weights loadable, and read them back.

vLLM keeps all experts of a layer in two parameters of its `RoutedExperts`. Each tensor-parallel rank holds a slice of
every expert's MLP: w13_weight [E, 2 * I / tp, H] (gate rows, then up rows) and w2_weight [E, H, I / tp].

On CPU vLLM packs both for its kernel and discards the originals, so a later `load_weights` would write into a packed
matrix. Packing and kernel are replaced by plain matrix products, as for linear layers.
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
    """Compute CPU experts from their parameters instead of packed copies. Call before the model is built."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def keep(self: Any, layer: torch.nn.Module) -> None:
        """Keep the parameters as loaded."""

    for name, replacement in (("process_weights_after_loading", keep), ("apply", _plain_experts)):
        getattr(CPUUnquantizedExperts, name)  # fail if a vLLM upgrade renames it
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
    """Write the weighted sum of each token's experts to `output` [T, H]; accumulates in float32."""
    if activation != MoEActivation.SILU or expert_map is not None or apply_router_weight_on_input:
        raise ModelError(f"experts on CPU: {activation} with expert_map {expert_map is not None} is not supported")
    total = torch.zeros_like(output, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        token, rank = torch.where(topk_ids == expert)
        gate, up = linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
        hidden = linear(silu(gate) * up, w2[expert])
        total.index_add_(0, token, hidden.float() * topk_weights[token, rank, None])
    output.copy_(total)


def expert_tensors(
    prefix: str, module: RoutedExperts, gather: Callable[[Tensor, int], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) of each expert weight of a layer, one at a time.

    Args:
        prefix: the module's name in the model.
        gather: concatenates the slices of all tensor-parallel ranks along a dimension.
    """
    if module.use_ep:
        raise ModelError(f"{prefix}: expert parallelism (enable_expert_parallel) is not supported by weight sync")
    for expert, (w13, w2) in enumerate(zip(module.w13_weight, module.w2_weight, strict=True)):
        gate, up = w13.chunk(2)
        for part, share, dim in (("gate_proj", gate, 0), ("up_proj", up, 0), ("down_proj", w2, 1)):
            yield _name(prefix, expert, part), gather(share, dim)


def expert_names(prefix: str, module: RoutedExperts) -> list[str]:
    """Return the Hugging Face names that `expert_tensors` yields."""
    parts = ("gate_proj", "up_proj", "down_proj")
    return [_name(prefix, expert, part) for expert in range(len(module.w13_weight)) for part in parts]


def _name(prefix: str, expert: int, part: str) -> str:
    return f"{prefix.removesuffix('.routed_experts')}.{expert}.{part}.weight"
