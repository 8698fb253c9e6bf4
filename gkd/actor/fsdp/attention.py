"""Let the models of transformers compute with packed sequences: their attention, and layers with a recurrent state.

transformers builds no mask for an attention function that it does not know. So what this function does not compute must
be refused: a model that needs it would silently compute something else. `probe.py` compares packs with weights.

Letters: B rows, S columns, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gkd.actor.common.attention import Scores, causal_attention
from gkd.errors import ConfigError, ModelError
from teacher_server.engines.gpu_kernels import computes_packs

PACKED_ATTENTION = "gkd_packed"
CURRENT_PACK = "gkd_pack"  # attribute of the model during a forward pass and its backward pass, which may repeat it
_FIX = "use actor.packing=false: the model's own attention then runs on padded sequences."
# Arguments of transformers' attention functions that are known and do not change the result.
_WITHOUT_EFFECT = ("position_ids", "cache_position", "use_cache", "is_causal")
_FEATURES = {"position_bias": "position biases on the scores", "head_mask": "a mask over heads"}


@dataclass(frozen=True, slots=True)
class Pack:
    """Boundaries of the sequences in a packed row; passed through the model's forward as the keyword `pack`."""

    cu_seqlens: Tensor | None  # [n + 1] int32, on the device of the activations; None: each row is one sequence
    lengths: Sequence[int] = ()  # tokens of each sequence
    longest: int | None = None  # their maximum, if known
    calls: list[str] | None = None  # list to which attention and recurrent modules append the names of their classes
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: [B, heads, S, D] (key, value: kv_heads) -> [B, S, heads, D], no weights.

    Raises:
        ConfigError: the model requests a feature that `causal_attention` lacks; the key is actor.packing.
        ModelError: the model requests dropout; the student never trains with it.
    """
    passes_window = "sliding_window" in kwargs
    window = kwargs.pop("sliding_window", None) or None  # 0 means none, too
    of = pack or Pack(None)
    if not torch.compiler.is_compiling():  # what is compiled has been probed without
        refuse_features(module, attention_mask, kwargs, passes_window=passes_window)
        if of.calls is not None:
            of.calls.append(type(module).__name__)
    if dropout:
        raise ModelError(f"{type(module).__name__} requests attention dropout {dropout}; the student trains without.")
    scores = Scores(scaling, window, softcap, s_aux)
    context = causal_attention(query, key, value, of.cu_seqlens, max_length=of.longest, scores=scores, group=of.group)
    return context.transpose(1, 2).contiguous(), None


def refuse_features(
    module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any], *, passes_window: bool = False
) -> None:
    """Raise ConfigError for actor.packing if the module requests a feature that `causal_attention` lacks.

    Args:
        kwargs: further arguments of the attention function. Those that are not known may change the result.
        passes_window: the module passes its window or None. Others may have one in their mask, which is not built here.
    """
    passed = [name for name, value in kwargs.items() if isinstance(value, Tensor) or value]
    features = [_FEATURES.get(name, f"the argument {name}") for name in passed if name not in _WITHOUT_EFFECT]
    if not passes_window and _has_masked_window(module):
        features.append("a sliding window that only its mask has")
    if attention_mask is not None:
        features.append("its own attention mask")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        features.append("attention to later tokens")
    if features:
        raise ConfigError("actor.packing", True, f"{type(module).__name__} uses {' and '.join(features)}.", _FIX)


def _has_masked_window(module: nn.Module) -> bool:
    """Return whether the model's code has a window in its mask only, as that of PhiMoE."""
    window = getattr(getattr(module, "config", None), "sliding_window", None)
    return bool(window) and hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask")


# Layers with a recurrent state or a convolution, such as gated delta nets and Mamba's, run once for each sequence of a
# pack, unless all of their kernels take its boundaries: the code of transformers without these ignores boundaries.


def run_per_sequence(model: nn.Module) -> None:
    """Let each module of a model that has a convolution over the columns compute the sequences of a pack separately.

    It runs once for each of them. On a GPU, modules for which `computes_packs` is true run once for the pack.
    """
    for module in [*model.modules()]:
        if is_recurrent(module):
            module.forward = _PerSequence(model, module)


def layers_with_boundaries(model: nn.Module) -> list[nn.Module]:
    """Return the modules that compute a pack in one call, if it is on a GPU."""
    return [m for m in model.modules() if isinstance(m.forward, _PerSequence) and m.forward.takes_boundaries]


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module has a convolution over the columns of its own."""
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def check_columns(model: nn.Module, cp: int) -> None:
    """Raise ConfigError for actor.cp if a layer needs whole sequences and a rank would have a part of their columns."""
    names = [type(module).__name__ for module in model.modules() if isinstance(module.forward, _PerSequence)]
    if cp > 1 and names:
        raise ConfigError("actor.cp", cp, f"the state of a {names[0]} passes through all columns.", "use 1.")


class _PerSequence:
    """The forward pass of a module that maps [1, S, ...] tensors to [1, S, ...] tensors, alone or in tuples."""

    def __init__(self, model: nn.Module, module: nn.Module) -> None:
        self.takes_boundaries = computes_packs(module)
        self._model = model
        self._name = type(module).__name__
        self._forward: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pack: Pack | None = getattr(self._model, CURRENT_PACK, None)
        if pack is not None and pack.calls is not None:
            pack.calls.append(self._name)
        if pack is None or pack.cu_seqlens is None:
            return self._forward(*args, **kwargs)
        if self.takes_boundaries and pack.cu_seqlens.is_cuda:
            return self._forward(*args, cu_seq_lens_q=pack.cu_seqlens, **kwargs)
        cut = [_cut((args, kwargs), pack.lengths, i) for i in range(len(pack.lengths))]
        results = [self._forward(*positional, **more) for positional, more in cut]
        if isinstance(results[0], tuple):
            return tuple(None if field[0] is None else torch.cat(field, dim=1) for field in zip(*results, strict=True))
        return torch.cat(results, dim=1)


def _cut(value: Any, lengths: Sequence[int], i: int) -> Any:
    """Return a value with the columns of sequence `i` alone in all tensors that have columns."""
    if isinstance(value, Tensor):
        has_columns = value.dim() > 1 and value.shape[1] == sum(lengths)
        return value.split(list(lengths), dim=1)[i] if has_columns else value
    if isinstance(value, tuple):
        return tuple(_cut(item, lengths, i) for item in value)
    if isinstance(value, dict):
        return {name: _cut(item, lengths, i) for name, item in value.items()}
    return replace(value, cu_seqlens=None, lengths=()) if isinstance(value, Pack) else value


def refuse_packing(model_type: str, why: str) -> ConfigError:
    """Return the error for a model that does not support packed sequences."""
    return ConfigError("actor.packing", True, f"a {model_type} model {why}.", _FIX)
