"""Match layers, make first values and merge weights of LoRA adapters, W + scale B A with W frozen, on both backends.

Letters: r rank, I inputs and O outputs of a linear layer.
Source: arXiv:2106.09685.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


def is_target(layer: str, target: str) -> bool:
    """Return whether an entry of actor.lora.targets names this layer: it is the last part of the layer's name."""
    return layer == target or layer.endswith(f".{target}")


def first_a(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return the first values of an A, [r, I] float32, drawn like a linear layer's. B starts with zeros."""
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float, *, transposed: bool = False) -> Tensor:
    """Return weight + scale B A, summed in float32, in the dtype of `weight`.

    Args:
        weight: [O, I]. Returned bit-exactly while B is zero.
        a: [r, I] float32.
        b: [O, r] float32.
        transposed: the weight is [I, O].
    """
    delta = scale * (b @ a)
    delta = delta.T if transposed else delta
    # Keep even the sign of a zero where nothing is added.
    return torch.where(delta == 0, weight, (weight.float() + delta).to(weight.dtype))


def scaled_factors(factors: Iterable[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield the factors of `Student.export` with the scale in B, as engines compute with them."""
    return ((name, tensor * scale if name.endswith(".lora_B.weight") else tensor) for name, tensor in factors)
