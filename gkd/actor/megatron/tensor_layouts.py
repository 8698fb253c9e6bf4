"""Split HF tensors into the Megatron parameters of TP ranks, and join them again.

Import: `TensorLayout.fill` reads one rank's part from HF tensors (or their slices on disk). Export:
`TensorLayout.join` combines the parts of all TP ranks. Values are only copied, so a round trip is bit-exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from gkd.hf.model_dims import ModelDims

# A Tensor or a safetensors slice: both read only the requested rows and columns.
Sliceable: TypeAlias = Any


class TensorLayout(Protocol):
    """How one Megatron parameter is made from its HF tensors."""

    partition_dim: int | None  # dimension of the Megatron parameter that TP splits; None means every rank has all of it

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        """Write this TP rank's part of the HF tensors `sources` into `param`, in Megatron's row order."""
        ...

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        """Return the full HF tensors of the parts of all TP ranks, [tp, *shape of the parameter]; may alias them."""
        ...


class Replicated:
    """Every TP rank holds the whole parameter: norms and routers."""

    partition_dim: int | None = None

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        param.copy_(sources[0][:])

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        return (shards[0],)


class SplitColumns:
    """Split along the input dimension: the second matrix of attention and of the MLP."""

    partition_dim: int | None = 1

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        width = param.shape[1]
        param.copy_(sources[0][:, tp_rank * width : (tp_rank + 1) * width])

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        return (shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=1),)


class SplitRows:
    """Split along the output dimension: the second factor of a LoRA adapter."""

    partition_dim: int | None = 0

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        rows = len(param)
        param.copy_(sources[0][tp_rank * rows : (tp_rank + 1) * rows])

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        return (shards.flatten(0, 1),)


class SplitVocab:
    """Split along the vocabulary; the last rows may be padding, zero here and absent in HF."""

    partition_dim: int | None = 0

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        rows = len(param)
        start = min(tp_rank * rows, dims.vocab_size)
        stop = min(start + rows, dims.vocab_size)
        param[: stop - start].copy_(sources[0][start:stop])
        param[stop - start :].zero_()

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        return (shards.flatten(0, 1)[: dims.vocab_size],)


class GatedMlp:
    """HF gate and up projection; each rank holds [its rows of gate; its rows of up]."""

    partition_dim: int | None = 0

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        rows = len(param) // 2
        for half, source in zip(param.split(rows), sources, strict=True):
            half.copy_(source[tp_rank * rows : (tp_rank + 1) * rows])

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        gate, up = shards.chunk(2, dim=1)  # [tp, rows, hidden]
        return gate.flatten(0, 1), up.flatten(0, 1)


class GroupedQkv:
    """HF q, k, v; per key/value head: its query heads, then its key, then its value. TP splits heads.

    Works for weights [rows, hidden] and biases [rows].
    """

    partition_dim: int | None = 0

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        groups = dims.n_kv_heads // tp
        grouped = param.view(groups, -1, *param.shape[1:])  # [groups, (q_per_group + 2) * head_dim, ...]
        sizes = [dims.n_heads // dims.n_kv_heads * dims.head_dim, dims.head_dim, dims.head_dim]
        for block, source in zip(grouped.split(sizes, dim=1), sources, strict=True):
            rows = groups * block.shape[1]
            block.copy_(source[tp_rank * rows : (tp_rank + 1) * rows].view(block.shape))

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        rows = shards.flatten(0, 1)
        q_rows = dims.n_heads // dims.n_kv_heads * dims.head_dim
        grouped = rows.view(dims.n_kv_heads, q_rows + 2 * dims.head_dim, *rows.shape[1:])
        parts = torch.split(grouped, [q_rows, dims.head_dim, dims.head_dim], dim=1)
        return tuple(part.reshape(-1, *part.shape[2:]) for part in parts)
