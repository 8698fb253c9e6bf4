"""Check by one forward pass of a few tokens that the model satisfies the assumptions of packing and the fused loss.

Both replace parts of a model's computation. Anything unusual that a model does there would silently be skipped. The
driver probes the model without weights, which finds most problems; the ranks probe it with weights.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gkd.actor.fsdp.attention import Pack, refuse_packing
from gkd.actor.fsdp.model import LossModel, reshard
from gkd.errors import ConfigError, GkdError
from gkd.log import get_logger

log = get_logger("actor.fsdp")

# Keys of config.json that change logits, if the model's code names them: a soft cap (Gemma 2) and factors (Cohere,
# Granite, Falcon-H1). The values None and 1 have no effect.
_OF_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@torch.no_grad()
def probe(root: LossModel, *, n_layers: int, packing: bool, fused: bool, device: torch.device) -> None:
    """Probe a model with weights. Collective over the world; all ranks raise the same error.

    Raises:
        ConfigError: the model does not support packing or the fused loss; the key is actor.packing or
            actor.fused_lm_head.
    """
    try:
        _check_forward(root, n_layers=n_layers, packing=packing, fused=fused, device=device)
    finally:
        reshard(root)


@torch.no_grad()
def probe_on_meta(hf: PreTrainedModel, *, n_layers: int, packing: bool, fused: bool) -> None:
    """Probe a model without weights. Moves `hf` to the meta device.

    Logits cannot be compared, so changes to them after the LM head are found only if config.json names them.

    Raises:
        ConfigError: see `probe`.
    """
    root = LossModel(hf.to("meta"))
    try:
        hf.set_experts_implementation("batched_mm")  # its shapes do not depend on the router's choice
        _check_forward(root, n_layers=n_layers, packing=packing, fused=fused, device=torch.device("meta"))
    except GkdError:
        raise
    except Exception as error:  # the model's own code needs values that a meta tensor does not have
        log.info(
            "a %s model cannot be probed without weights (%s); the ranks probe it",
            hf.config.model_type,
            type(error).__name__,
        )
    if fused and (named := _named_change(hf)):
        raise _refuse_fused(hf.config.model_type, f"its logits after the LM head ({named})")


def _check_forward(root: LossModel, *, n_layers: int, packing: bool, fused: bool, device: torch.device) -> None:
    calls: list[str] = []
    tokens = torch.tensor([[0, 1, 0]], device=device)
    arguments: dict[str, Any] = {}
    if packing:
        # On the meta device nothing is computed, but the boundaries are read.
        boundaries = torch.tensor([0, 2, 3], dtype=torch.int32, device="cpu" if device.type == "meta" else device)
        arguments = {"pack": Pack(boundaries, 2, calls), "position_ids": torch.tensor([[0, 1, 0]], device=device)}
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
    model_type = root.hf.config.model_type
    if packing and len(calls) < n_layers:
        why = f"has {n_layers} layers, but only {len(calls)} of them use attention that supports packed sequences"
        raise refuse_packing(model_type, why)
    if fused and len(seen) < 3:
        raise ConfigError(
            "actor.fused_lm_head",
            True,
            f"a {model_type} model does not use its backbone and LM head in its forward pass, as the fused loss does.",
            "use actor.fused_lm_head=false.",
        )
    if fused and device.type != "meta":
        between = not _same(seen["hidden"], seen["head_input"])
        after = root.head.bias is not None or not _same(seen["head_output"], logits)
        if between or after:
            what = "its hidden states before" if between else "its logits after"
            raise _refuse_fused(model_type, f"{what} the LM head (a scale, a soft cap, a bias)")


def _named_change(hf: PreTrainedModel) -> str:
    """Return the config keys that change logits after the LM head's product; empty if there are none."""
    if hf.get_output_embeddings().bias is not None:
        return "a bias"
    config, code = hf.config.get_text_config(), _source(type(hf))
    found = {name: getattr(config, name, None) for name in _OF_LOGITS if name in code}
    return ", ".join(f"{name} {value}" for name, value in found.items() if value not in (None, 1))


def _source(kind: type) -> str:
    """Return the source of the module that defines a model, to see which config keys it reads; empty if unavailable."""
    module = inspect.getmodule(kind)
    try:
        return inspect.getsource(module) if module is not None else ""
    except OSError:
        return ""


def _refuse_fused(model_type: str, what: str) -> ConfigError:
    problem = f"a {model_type} model changes {what}, which the fused loss would skip."
    return ConfigError("actor.fused_lm_head", True, problem, "use actor.fused_lm_head=false.")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=0.0, atol=0.0, equal_nan=True)
