"""Plan flat byte buckets for named tensors, and digest tensors: the part of weight sync without communication.

Sender and receivers derive the same buckets from the same list of `TensorSpec`, so only raw bytes are sent. A bucket
has whole tensors; a tensor larger than the bucket size has a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
import xxhash

# What is sent. merged: all weights, with the product of the adapters added. base: all weights, without it. adapters:
# their factors, as `layer.lora_A.weight` and `layer.lora_B.weight`. Without adapters merged and base are the same.
Content: TypeAlias = Literal["merged", "base", "adapters"]

# Offsets are multiples of this, so a view of any dtype into a bucket is aligned.
_ALIGN_BYTES = 256
_SUMMED_BYTES = 4 << 20  # at a time
_FACTOR = -7046029254386353131  # an odd number whose multiples differ in all bits (2**64 / golden ratio, signed)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Hugging Face name, shape and dtype of a tensor, known before any byte of it is sent."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32" | "bfloat16" | "float16"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def n_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Specs of tensors, and the offset of each in a flat uint8 buffer of `n_bytes`."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    n_bytes: int

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, view) of each tensor in `buffer`, [>= n_bytes] uint8, without a copy."""
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            raw = buffer[offset : offset + spec.n_bytes]
            yield spec.name, raw.view(spec.torch_dtype).view(spec.shape)


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Return the buckets, filled greedily in the given order, in which the exporter streams the tensors."""
    buckets: list[Bucket] = []
    pending: list[TensorSpec] = []
    offsets: list[int] = []
    end = 0
    for spec in specs:
        start = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        if pending and start + spec.n_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(pending), tuple(offsets), end))
            pending = []
            offsets = []
            start = 0
        pending.append(spec)
        offsets.append(start)
        end = start + spec.n_bytes
    if pending:
        buckets.append(Bucket(tuple(pending), tuple(offsets), end))
    return buckets


def layout(buckets: Sequence[Bucket]) -> tuple[list[int], int]:
    """Return the offset of each bucket in one buffer that holds all of them, and the size of that buffer."""
    offsets = []
    end = 0
    for bucket in buckets:
        offsets.append(end)
        end += -(-bucket.n_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return offsets, end


def checksum(data: torch.Tensor) -> int:
    """Return a 64-bit checksum of a uint8 tensor: xxh3 on the CPU, which is the fastest, `word_sum` on a GPU."""
    if data.device.type != "cpu":
        return word_sum(data)
    return int(xxhash.xxh3_64_intdigest(np.from_dlpack(data).data))


def word_sum(data: torch.Tensor) -> int:
    """Return a sum of the 64-bit words of a uint8 tensor, each times an odd factor of its place, modulo 2**64.

    Every change of a single word changes it. It is computed where the data are, so that no byte passes through the
    host, and is the same on every device.
    """
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    n_factors = -(-min(data.numel(), _SUMMED_BYTES) // 8)
    factors = torch.arange(n_factors, device=data.device).mul_(_FACTOR).bitwise_or_(1)
    for part in data.split(_SUMMED_BYTES):
        rest = -part.numel() % 8  # zeros behind the end of the last part
        words = (torch.nn.functional.pad(part, (0, rest)) if rest else part).view(torch.int64)
        scales = factors[: len(words)]
        # torch.dot needs no memory for the terms, and has no integers on a GPU.
        total = total * _FACTOR + (torch.dot(scales, words) if data.device.type == "cpu" else (scales * words).sum())
    return int(total) % (1 << 64)


def digest(tensor: torch.Tensor, device: torch.device | None = None) -> str:
    """Return dtype, shape and a checksum of a tensor; tensors that differ in one word have different digests.

    Args:
        device: where the run has its weights; None means where the tensor is. Equal tensors of one run have equal
            digests: xxh3 on the CPU, which is the fastest, and `word_sum` on GPUs, also of versions kept on the host.
    """
    data = tensor.detach().contiguous()
    raw = data.reshape(-1).view(torch.uint8)
    value = checksum(raw) if (device or tensor.device).type == "cpu" else word_sum(raw)
    return f"{data.dtype} {tuple(data.shape)} {value:016x}"


def differing(sent: dict[str, str], received: dict[str, str]) -> list[str]:
    """Return the names whose digests differ or that only one side has, sorted."""
    return sorted(name for name in sent.keys() | received.keys() if sent.get(name) != received.get(name))
