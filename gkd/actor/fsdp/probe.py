"""One forward pass of a few tokens, to see that the model computes what packing and the fused loss take for granted.

Both look at parts of a model and fill in the rest themselves. What a model does there beyond the usual would be left
out without a word, so it is looked for here, in the model as it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gkd.actor.fsdp.attention import Pack, refuse_packing
from gkd.actor.fsdp.model import LossModel, reshard
from gkd.errors import ConfigError


@torch.no_grad()
def probe(root: LossModel, *, n_layers: int, packing: bool, fused: bool, device: torch.device) -> None:
    """Collective over the world; all ranks raise the same.

    Raises:
        ConfigError: naming actor.packing or actor.fused_lm_head, which the model does not bear.
    """
    calls: list[str] = []
    tokens = torch.tensor([[0, 1, 0]], device=device)
    arguments: dict[str, Any] = {}
    if packing:
        cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32, device=device)
        arguments = {"pack": Pack(cu_seqlens, 2, calls), "position_ids": torch.tensor([[0, 1, 0]], device=device)}
    seen: dict[str, Tensor] = {}

    def keep_hidden(_module: Any, _inputs: Any, output: Any) -> None:
        seen["hidden"] = output[0]

    def keep_head(_module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["head_input"], seen["head_output"] = inputs[0], output[0]

    hooks = [root.hf.base_model.register_forward_hook(keep_hidden), root.head.register_forward_hook(keep_head)]
    try:
        logits = root(tokens, torch.arange(3, device=device), **arguments)
    finally:
        for hook in hooks:
            hook.remove()
        reshard(root)
    model_type = root.hf.config.model_type
    if packing and len(calls) < n_layers:
        why = f"has {n_layers} layers, and only {len(calls)} of them attend in a way that knows packed sequences"
        raise refuse_packing(model_type, why)
    if fused:
        between = not _same(seen["hidden"], seen["head_input"])
        after = root.head.bias is not None or not _same(seen["head_output"], logits)
        if between or after:
            problem = f"a {model_type} model changes {'its hidden states before' if between else 'its logits after'} "
            raise ConfigError(
                "actor.fused_lm_head",
                True,
                f"{problem}the LM head (a scale, a soft cap, a bias), and the fused loss would leave that out.",
                "use actor.fused_lm_head=false.",
            )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=0.0, atol=0.0, equal_nan=True)
