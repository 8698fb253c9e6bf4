"""One table: which HF tensors make which Megatron parameter, and how TP ranks share them.

Used in both directions. Import: `TensorLayout.take` reads one rank's part out of HF tensors (or
their slices on disk). Export: `TensorLayout.join` puts the parts of all TP ranks together again.
Neither direction computes anything, so a round trip returns the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from gkd.actor.megatron.hf_config import HfDims
from gkd.actor.megatron.layout import ParallelLayout

Shape: TypeAlias = tuple[int, ...]
# A Tensor or a safetensors slice: both read no more than the rows and columns they are asked for.
Sliceable: TypeAlias = Any


class TensorLayout(Protocol):
    """How one Megatron parameter is cut out of its HF tensors."""

    partition_dim: int | None  # of the Megatron parameter that TP cuts; None: every rank has all of it

    def take(self, sources: Sequence[Sliceable], dims: HfDims, tp: int, tp_rank: int) -> Tensor:
        """This TP rank's part of the HF tensors `sources`, in Megatron's row order."""
        ...

    def join(self, shards: Sequence[Tensor], dims: HfDims) -> tuple[Tensor, ...]:
        """The full HF tensors from the parts of all TP ranks, in rank order."""
        ...


class Replicated:
    """Every TP rank holds all of it: norms."""

    partition_dim: int | None = None

    def take(self, sources: Sequence[Sliceable], dims: HfDims, tp: int, tp_rank: int) -> Tensor:
        whole: Tensor = sources[0][:]
        return whole

    def join(self, shards: Sequence[Tensor], dims: HfDims) -> tuple[Tensor, ...]:
        return (shards[0],)


class SplitColumns:
    """Cut along the input dimension: the second matrix of attention and of the MLP."""

    partition_dim: int | None = 1

    def take(self, sources: Sequence[Sliceable], dims: HfDims, tp: int, tp_rank: int) -> Tensor:
        width = _shape(sources[0])[1] // tp
        part: Tensor = sources[0][:, tp_rank * width : (tp_rank + 1) * width]
        return part

    def join(self, shards: Sequence[Tensor], dims: HfDims) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards), dim=1),)


class SplitVocab:
    """Cut along the vocabulary; the last rows may be padding, zero here and absent in HF."""

    partition_dim: int | None = 0

    def take(self, sources: Sequence[Sliceable], dims: HfDims, tp: int, tp_rank: int) -> Tensor:
        rows = -(-dims.vocab_size // tp)
        start = min(tp_rank * rows, dims.vocab_size)
        real = sources[0][start : min(start + rows, dims.vocab_size)]  # [<= rows, hidden]
        return torch.cat([real, real.new_zeros(rows - real.shape[0], real.shape[1])])

    def join(self, shards: Sequence[Tensor], dims: HfDims) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards))[: dims.vocab_size],)


class GatedMlp:
    """HF gate and up projection -> on each rank [its rows of gate; its rows of up]."""

    partition_dim: int | None = 0

    def take(self, sources: Sequence[Sliceable], dims: HfDims, tp: int, tp_rank: int) -> Tensor:
        rows = dims.ffn_size // tp
        return torch.cat([source[tp_rank * rows : (tp_rank + 1) * rows] for source in sources])

    def join(self, shards: Sequence[Tensor], dims: HfDims) -> tuple[Tensor, ...]:
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])


class GroupedQkv:
    """HF q, k, v -> per key/value head: its query heads, then its key, then its value; heads cut over TP.

    Works for weights [rows, hidden] and biases [rows].
    """

    partition_dim: int | None = 0

    def take(self, sources: Sequence[Sliceable], dims: HfDims, tp: int, tp_rank: int) -> Tensor:
        groups = dims.n_kv_heads // tp
        parts = []
        for source in sources:
            rows = _shape(source)[0] // tp
            part = source[tp_rank * rows : (tp_rank + 1) * rows]
            parts.append(part.view(groups, rows // groups, *part.shape[1:]))
        grouped = torch.cat(parts, dim=1)  # [groups, (q_per_group + 2) * head_dim, ...]
        return grouped.reshape(-1, *grouped.shape[2:])

    def join(self, shards: Sequence[Tensor], dims: HfDims) -> tuple[Tensor, ...]:
        rows = torch.cat(list(shards))
        q_rows = dims.n_heads // dims.n_kv_heads * dims.head_dim
        grouped = rows.view(dims.n_kv_heads, q_rows + 2 * dims.head_dim, *rows.shape[1:])
        parts = torch.split(grouped, [q_rows, dims.head_dim, dims.head_dim], dim=1)
        return tuple(part.reshape(-1, *part.shape[2:]) for part in parts)


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table. Names are relative to the model or, for layer rules, to the layer."""

    param: str
    hf: tuple[str, ...]
    layout: TensorLayout
    shapes: Callable[[HfDims], tuple[Shape, ...]]  # of the HF tensors
    when: Callable[[HfDims], bool] = lambda dims: True


def _q_rows(dims: HfDims) -> int:
    return dims.n_heads * dims.head_dim


def _kv_rows(dims: HfDims) -> int:
    return dims.n_kv_heads * dims.head_dim


def _vocab_shape(d: HfDims) -> tuple[Shape, ...]:
    return ((d.vocab_size, d.hidden_size),)


def _hidden_shape(d: HfDims) -> tuple[Shape, ...]:
    return ((d.hidden_size,),)


def _head_shape(d: HfDims) -> tuple[Shape, ...]:
    return ((d.head_dim,),)


_EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), SplitVocab(), _vocab_shape)
_FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated(), _hidden_shape)
_LM_HEAD = Rule("output_layer.weight", ("lm_head.weight",), SplitVocab(), _vocab_shape)

_LAYER_RULES = (
    Rule("input_layernorm.weight", ("input_layernorm.weight",), Replicated(), _hidden_shape),
    Rule(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        GroupedQkv(),
        lambda d: ((_q_rows(d), d.hidden_size), (_kv_rows(d), d.hidden_size), (_kv_rows(d), d.hidden_size)),
    ),
    Rule(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        GroupedQkv(),
        lambda d: ((_q_rows(d),), (_kv_rows(d),), (_kv_rows(d),)),
        when=lambda d: d.qkv_bias,
    ),
    Rule(
        "self_attention.q_layernorm.weight",
        ("self_attn.q_norm.weight",),
        Replicated(),
        _head_shape,
        when=lambda d: d.qk_norm,
    ),
    Rule(
        "self_attention.k_layernorm.weight",
        ("self_attn.k_norm.weight",),
        Replicated(),
        _head_shape,
        when=lambda d: d.qk_norm,
    ),
    Rule(
        "self_attention.linear_proj.weight",
        ("self_attn.o_proj.weight",),
        SplitColumns(),
        lambda d: ((d.hidden_size, _q_rows(d)),),
    ),
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Replicated(), _hidden_shape),
    Rule(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        GatedMlp(),
        lambda d: ((d.ffn_size, d.hidden_size), (d.ffn_size, d.hidden_size)),
    ),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), SplitColumns(), lambda d: ((d.hidden_size, d.ffn_size),)),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A rule applied to one parameter of one stage."""

    param: str  # full name in the stage's Megatron model, layers numbered from 0 in the stage; see `chunk_prefix`
    hf_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    layout: TensorLayout
    exported: bool = True  # False for the second copy of a tied embedding


def chunk_prefix(layout: ParallelLayout, chunk: int) -> str:
    """What stands before the Megatron names of a chunk's parameters, where a stage has several."""
    return f"chunk{chunk}." if layout.vpp > 1 else ""


def stage_entries(dims: HfDims, layout: ParallelLayout) -> list[TensorEntry]:
    """Every parameter of this rank's pipeline stage, in the order of the model; the same on all its TP ranks."""
    return [entry for chunk in range(layout.vpp) for entry in _chunk_entries(dims, layout, chunk)]


def _chunk_entries(dims: HfDims, layout: ParallelLayout, chunk: int) -> list[TensorEntry]:
    prefix = chunk_prefix(layout, chunk)
    entries = [_entry(_EMBEDDING, dims, prefix)] if layout.holds_embedding(chunk) else []
    for local, number in enumerate(layout.layer_range(dims, chunk)):
        for rule in _LAYER_RULES:
            if rule.when(dims):
                entries.append(_entry(rule, dims, f"{prefix}decoder.layers.{local}.", f"model.layers.{number}."))
    if layout.holds_head(chunk):
        entries.append(_entry(_FINAL_NORM, dims, prefix))
        if not dims.tied_embeddings:
            entries.append(_entry(_LM_HEAD, dims, prefix))
        elif not layout.is_first_stage:
            # The last stage has its own copy of the tied matrix; Megatron sums the two gradients.
            entries.append(
                TensorEntry(prefix + _LM_HEAD.param, _EMBEDDING.hf, _vocab_shape(dims), _LM_HEAD.layout, exported=False)
            )
    return entries


def expected_hf_tensors(dims: HfDims) -> dict[str, Shape]:
    """Name and shape of every tensor of the whole HF model."""
    whole = ParallelLayout(tp=1, pp=1, world_size=1, rank=0)
    entries = stage_entries(dims, whole)
    return {name: shape for e in entries for name, shape in zip(e.hf_names, e.hf_shapes, strict=True)}


def _entry(rule: Rule, dims: HfDims, param_prefix: str = "", hf_prefix: str = "") -> TensorEntry:
    hf_names = tuple(hf_prefix + name for name in rule.hf)
    return TensorEntry(param_prefix + rule.param, hf_names, rule.shapes(dims), rule.layout)


def _shape(source: Sliceable) -> Shape:
    return tuple(source.shape if isinstance(source, Tensor) else source.get_shape())
