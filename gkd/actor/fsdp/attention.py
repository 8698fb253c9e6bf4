"""Packed sequences in transformers' models: `gkd.actor.common.attention` under a name that their configs can ask for.

transformers makes no mask for an attention function it does not know, so what this one does not do must be refused:
a model that counts on it would train on something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from gkd.actor.common.attention import causal_attention
from gkd.errors import ConfigError, ModelError

PACKED_ATTENTION = "gkd_packed"
_FIX = "use actor.packing=false: the model's own attention then runs on padded sequences."
# Arguments of transformers' attention functions that change the result, and what they are.
_FEATURES = {
    "sliding_window": "a sliding window",
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "position biases on the scores",
    "head_mask": "a mask over heads",
}


@dataclass(frozen=True, slots=True)
class Pack:
    """Where the sequences of a packed row begin; goes through the model's forward as the keyword `pack`."""

    cu_seqlens: Tensor  # [n + 1] int32, on the device of the activations
    max_length: int  # of the longest sequence
    calls: list[str] | None = None  # gets the name of each attention module's class, where somebody counts


def register_packed_attention() -> None:
    """Makes `PACKED_ATTENTION` a value of `attn_implementation`. May be called again."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    pack: Pack | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention contract: [B, heads, S, D] (key, value: kv_heads) -> [B, S, heads, D], no weights.

    Raises:
        ConfigError: naming actor.packing: the model asks for something that `causal_attention` does not do.
        ModelError: dropout; the student never trains with it.
    """
    refuse_features(module, attention_mask, kwargs)
    if dropout:
        raise ModelError(f"{type(module).__name__} asks for attention dropout {dropout}; the student trains without.")
    if pack is not None and pack.calls is not None:
        pack.calls.append(type(module).__name__)
    borders, longest = (None, None) if pack is None else (pack.cu_seqlens, pack.max_length)
    context = causal_attention(query, key, value, borders, max_length=longest, scale=scaling)
    return context.transpose(1, 2).contiguous(), None


def refuse_features(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raises ConfigError naming actor.packing for the first thing that plain causal attention would leave out."""
    who = type(module).__name__
    asked = [text for name, text in _FEATURES.items() if kwargs.get(name) is not None]
    if attention_mask is not None:
        asked.append("a mask of its own")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        asked.append("attention to later tokens")
    if asked:
        raise ConfigError("actor.packing", True, f"{who} asks for {' and '.join(asked)}.", _FIX)


def refuse_packing(model_type: str, why: str) -> ConfigError:
    """The error for a model that cannot take packs at all."""
    return ConfigError("actor.packing", True, f"a {model_type} model {why}.", _FIX)
