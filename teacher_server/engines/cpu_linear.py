"""float32 matrix products of a model on a CPU by oneDNN, which torch uses for bfloat16 only.

For float32 torch takes MKL. On AMD processors with AVX-512, MKL leaves half of them idle: 1.9 ms for
a row of the LM head (V = 152k, H = 512) against 0.95. torch has no switch for it; the operator is
the one that its compiler puts in place of a linear layer.
"""

from __future__ import annotations

from functools import partial

import torch


def use_onednn(model: torch.nn.Module) -> int:
    """Replace the product in every plain float32 linear layer; returns how many. None where torch lacks oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return 0
    layers = [
        module for module in model.modules() if type(module) is torch.nn.Linear and module.weight.dtype == torch.float32
    ]
    for layer in layers:
        layer.forward = partial(_linear, layer)  # type: ignore[method-assign]
    return len(layers)


def _linear(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
