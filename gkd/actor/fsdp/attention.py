"""Register `gkd.actor.common.attention` with transformers, so that its models accept packed sequences.

transformers builds no mask for an attention function that it does not know. So features that this function lacks must
be refused: a model that needs them would silently compute something else.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gkd.actor.common.attention import causal_attention
from gkd.errors import ConfigError, ModelError

PACKED_ATTENTION = "gkd_packed"
_FIX = "use actor.packing=false: the model's own attention then runs on padded sequences."
# Arguments of transformers' attention functions that change the result -> description.
_FEATURES = {
    "sliding_window": "a sliding window",
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "position biases on the scores",
    "head_mask": "a mask over heads",
}


@dataclass(frozen=True, slots=True)
class Pack:
    """Boundaries of the sequences in a packed row; passed through the model's forward as the keyword `pack`."""

    cu_seqlens: Tensor | None  # [n + 1] int32, on the device of the activations; None: each row is one sequence
    max_length: int | None  # length of the longest sequence
    calls: list[str] | None = None  # list to which each call appends the class name of its attention module
    group: dist.ProcessGroup | None = None  # ranks that have other columns of the same rows


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
    """Compute attention for transformers: [B, heads, S, D] (key, value: kv_heads) -> [B, S, heads, D], no weights.

    Raises:
        ConfigError: the model requests a feature that `causal_attention` lacks; the key is actor.packing.
        ModelError: the model requests dropout; the student never trains with it.
    """
    refuse_features(module, attention_mask, kwargs)
    if dropout:
        raise ModelError(f"{type(module).__name__} requests attention dropout {dropout}; the student trains without.")
    if pack is not None and pack.calls is not None:
        pack.calls.append(type(module).__name__)
    of = pack or Pack(None, None)
    context = causal_attention(
        query, key, value, of.cu_seqlens, max_length=of.max_length, scale=scaling, group=of.group
    )
    return context.transpose(1, 2).contiguous(), None


def refuse_features(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raise ConfigError for actor.packing if the module requests a feature that plain causal attention lacks."""
    features = [text for name, text in _FEATURES.items() if kwargs.get(name) is not None]
    if "sliding_window" not in kwargs and _has_masked_window(module):
        features.append(_FEATURES["sliding_window"])
    if attention_mask is not None:
        features.append("its own attention mask")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        features.append("attention to later tokens")
    if features:
        problem = f"{type(module).__name__} uses {' and '.join(features)}."
        raise ConfigError("actor.packing", True, problem, _FIX)


def _has_masked_window(module: nn.Module) -> bool:
    """Return whether the model's code has a window in its mask only, which is not built here, as that of PhiMoE."""
    window = getattr(getattr(module, "config", None), "sliding_window", None)
    return window is not None and hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask")


def refuse_packing(model_type: str, why: str) -> ConfigError:
    """Return the error for a model that does not support packed sequences."""
    return ConfigError("actor.packing", True, f"a {model_type} model {why}.", _FIX)
