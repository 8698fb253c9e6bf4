"""Keep kernels for GPUs from tensors on other devices, and let recurrent layers compute a pack on a GPU in one call.

Where the packages `fla`, `causal_conv1d` or `mamba_ssm` are installed, transformers 5.19 calls their kernels in
recurrent layers and convolutions, whatever device the tensors are on. On a CPU such a kernel fails. On the meta device
Triton launches it with null pointers, if the machine has a GPU.

Letters: S columns, D channels of a convolution, W its width, H heads, K and P head sizes, G groups of heads with the
same b and c, n sequences of a pack.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations import hub_kernels

# Modules whose gated delta nets or Mamba 2 layers hand boundaries on to the functions of `_OF_PACKS`. Nothing else in
# these layers passes from one column to another. The model type mamba2 is left out: where fla has been imported, it is
# a class of fla's.
_DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_MAMBA_2 = ("nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "zamba2")
_HAND_ON = tuple(f"transformers.models.{name}.modeling_{name}" for name in (*_DELTA_NETS, *_MAMBA_2))


def computes_packs(layer: torch.nn.Module) -> bool:
    """Return whether a layer that has a convolution computes a pack on a GPU in one call.

    The keyword `cu_seq_lens_q` of its forward pass then has the boundaries: [n + 1], from 0 to S, on the GPU. The
    functions of the layer's module must have been replaced by `keep_kernels_on_gpus`.
    """
    return type(layer).__module__ in _HAND_ON and find_spec("fla") is not None


def keep_kernels_on_gpus(model: torch.nn.Module) -> None:
    """Let the recurrent layers of a model compute with transformers' own code where their tensors are not on a GPU.

    It replaces functions in the modules that define the model's classes, for all models of the process. Idempotent.
    """
    for module in {sys.modules[type(layer).__module__] for layer in model.modules()}:
        for name, function in [*vars(module).items()]:
            is_function = isinstance(function, FunctionType) and hasattr(function, "__wrapped__")
            if is_function and function.__code__.co_filename == hub_kernels.__file__:
                of_packs = _OF_PACKS.get(name) if module.__name__ in _HAND_ON else None
                setattr(module, name, _by_device(function, of_packs))


def _by_device(function: Callable[..., Any], of_packs: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a function that calls transformers' choice for tensors on a GPU, else the code in torch that it wraps.

    With boundaries it calls `of_packs`, whatever the device: code that does not know them would leave them out.
    """
    in_torch = inspect.unwrap(function)
    parameters = inspect.signature(in_torch).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    @functools.wraps(in_torch)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        if of_packs is not None and any(kwargs.get(name) is not None for name in ("cu_seq_lens_q", "cu_seqlens")):
            return of_packs(*args, **kwargs)
        if any(isinstance(value, torch.Tensor) and value.is_cuda for value in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        # Layers pass arguments that only the kernels have, such as boundaries.
        accepted = {name: value for name, value in kwargs.items() if takes_all or name in parameters}
        return in_torch(*args, **accepted)

    return chosen


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str, cu_seq_lens_q: Tensor, **_: Any
) -> Tensor:
    """Convolve the sequences of a pack, [1, D, S], with [D, W] weights, causally; transformers passes no boundaries."""
    from fla.modules.causal_conv1d import causal_conv1d

    result, _state = causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=cu_seq_lens_q)
    return result.transpose(1, 2)


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, use_qk_l2norm_in_kernel: bool, **gates: Any
) -> tuple[Tensor, None]:
    """Compute the gated delta rule of a pack: q, k, v [1, S, H, K]; gates g and beta [1, S, H]. Returns no state."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    norms = use_qk_l2norm_in_kernel
    gates = {name: gates[name] for name in ("g", "beta")}
    return chunk_gated_delta_rule(q, k, v, use_qk_l2norm_in_kernel=norms, cu_seqlens=cu_seqlens, **gates)


def _state_space(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> Tensor:
    """Compute Mamba 2's recurrence of a pack as linear attention with queries c, keys b, values dt x and decays.

    h_t = exp(dt a) h_{t-1} + b (dt x)^T and y_t = h_t^T c + D x, with dt = softplus(dt + dt_bias) within its limits,
    for x [1, S, H, P]; dt [1, S, H]; a, D and dt_bias [H]; b and c [1, S, G, K]. Returns y, float32 as transformers.

    Source: arXiv:2405.21060, section 5.
    """
    from fla.ops.simple_gla import chunk_simple_gla

    dt = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    k, q = (each.repeat_interleave(x.shape[2] // each.shape[2], dim=2) for each in (b, c))
    v = (dt[..., None] * x).to(x.dtype)
    y, _state = chunk_simple_gla(q, k, v, g=dt * a, scale=1.0, cu_seqlens=cu_seq_lens_q)
    return y + D.float()[:, None] * x


_OF_PACKS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    # Of mamba_ssm. It computes convolution and recurrence; layers call these one by one if it returns no result.
    "mamba2_split_conv1d_scan_combined": lambda *_args, **_kwargs: None,
    "mamba2_chunk_scan": _state_space,
}
