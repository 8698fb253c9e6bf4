"""One table: which HF tensors make which Megatron parameter, and how TP and EP ranks share them.

Used in both directions. Import: `TensorLayout.fill` reads one rank's part out of HF tensors (or
their slices on disk). Export: `TensorLayout.join` puts the parts of all TP ranks together again.
Neither direction computes anything, so a round trip returns the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from gkd.actor.megatron.layout import ParallelLayout
from gkd.hf.model_dims import ModelDims, MoeDims

Shape: TypeAlias = tuple[int, ...]
# A Tensor or a safetensors slice: both read no more than the rows and columns they are asked for.
Sliceable: TypeAlias = Any


class TensorLayout(Protocol):
    """How one Megatron parameter is cut out of its HF tensors."""

    partition_dim: int | None  # of the Megatron parameter that TP cuts; None: every rank has all of it

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        """Writes this TP rank's part of the HF tensors `sources` into `param`, in Megatron's row order."""
        ...

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        """The full HF tensors from the parts of all TP ranks, [tp, *shape of the parameter]; may alias them."""
        ...


class Replicated:
    """Every TP rank holds all of it: norms and routers."""

    partition_dim: int | None = None

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        param.copy_(sources[0][:])

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        return (shards[0],)


class SplitColumns:
    """Cut along the input dimension: the second matrix of attention and of the MLP."""

    partition_dim: int | None = 1

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        width = param.shape[1]
        param.copy_(sources[0][:, tp_rank * width : (tp_rank + 1) * width])

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        return (shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=1),)


class SplitVocab:
    """Cut along the vocabulary; the last rows may be padding, zero here and absent in HF."""

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
    """HF gate and up projection -> on each rank [its rows of gate; its rows of up]."""

    partition_dim: int | None = 0

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        rows = len(param) // 2
        for half, source in zip(param.split(rows), sources, strict=True):
            half.copy_(source[tp_rank * rows : (tp_rank + 1) * rows])

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        gate, up = shards.chunk(2, dim=1)  # [tp, rows, hidden]
        return gate.flatten(0, 1), up.flatten(0, 1)


class GroupedQkv:
    """HF q, k, v -> per key/value head: its query heads, then its key, then its value; heads cut over TP.

    Works for weights [rows, hidden] and biases [rows].
    """

    partition_dim: int | None = 0

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        groups = dims.n_kv_heads // tp
        grouped = param.view(groups, -1, *param.shape[1:])  # [groups, (q_per_group + 2) * head_dim, ...]
        sizes = [_q_rows(dims) // dims.n_kv_heads, dims.head_dim, dims.head_dim]
        for place, source in zip(grouped.split(sizes, dim=1), sources, strict=True):
            rows = groups * place.shape[1]
            place.copy_(source[tp_rank * rows : (tp_rank + 1) * rows].view(place.shape))

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        rows = shards.flatten(0, 1)
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
    shapes: Callable[[ModelDims], tuple[Shape, ...]]  # of the HF tensors
    when: Callable[[ModelDims], bool] = lambda dims: True  # has a model of `dims` this parameter?


def _q_rows(dims: ModelDims) -> int:
    return dims.n_heads * dims.head_dim


def _kv_rows(dims: ModelDims) -> int:
    return dims.n_kv_heads * dims.head_dim


def _vocab_shape(d: ModelDims) -> tuple[Shape, ...]:
    return ((d.vocab_size, d.hidden_size),)


def _hidden_shape(d: ModelDims) -> tuple[Shape, ...]:
    return ((d.hidden_size,),)


def _head_shape(d: ModelDims) -> tuple[Shape, ...]:
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
)

_MLP_RULES = (
    Rule(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        GatedMlp(),
        lambda d: ((d.ffn_size, d.hidden_size), (d.ffn_size, d.hidden_size)),
    ),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), SplitColumns(), lambda d: ((d.hidden_size, d.ffn_size),)),
)


def _expert_shapes(d: ModelDims) -> tuple[Shape, ...]:
    return ((_moe(d).ffn_size, d.hidden_size),) * 2


_ROUTER = Rule("mlp.router.weight", ("mlp.gate.weight",), Replicated(), lambda d: ((_moe(d).n_experts, d.hidden_size),))

# Names relative to an expert. TP does not cut experts.
_EXPERT_RULES = (
    Rule("linear_fc1.weight", ("gate_proj.weight", "up_proj.weight"), GatedMlp(), _expert_shapes),
    Rule(
        "linear_fc2.weight",
        ("down_proj.weight",),
        SplitColumns(),
        lambda d: ((d.hidden_size, _moe(d).ffn_size),),
    ),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A rule applied to one parameter of one stage."""

    param: str  # full name in the stage's Megatron model, layers numbered from 0 in the stage; see `chunk_prefix`
    hf_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    layout: TensorLayout
    exported: bool = True  # False for the second copy of a tied embedding
    # The EP rank that has this expert, whole, and in whose model `param` is; the others have another expert of the same
    # shape under that name. None: not an expert's.
    owner: int | None = None


def chunk_prefix(layout: ParallelLayout, chunk: int) -> str:
    """What stands before the Megatron names of a chunk's parameters, where a stage has several."""
    return f"chunk{chunk}." if layout.vpp > 1 else ""


def stage_entries(dims: ModelDims, layout: ParallelLayout) -> list[TensorEntry]:
    """Every parameter of this rank's pipeline stage, in the order of the model; the same on all ranks of the stage."""
    return [entry for chunk in range(layout.vpp) for entry in _chunk_entries(dims, layout, chunk)]


def _chunk_entries(dims: ModelDims, layout: ParallelLayout, chunk: int) -> list[TensorEntry]:
    prefix = chunk_prefix(layout, chunk)
    entries = [_entry(_EMBEDDING, dims, prefix)] if layout.holds_embedding(chunk) else []
    for local, number in enumerate(layout.layer_range(dims, chunk)):
        prefixes = f"{prefix}decoder.layers.{local}.", f"model.layers.{number}."
        is_moe = dims.is_moe_layer(number)
        for rule in (*_LAYER_RULES, *([_ROUTER] if is_moe else _MLP_RULES)):
            if rule.when(dims):
                entries.append(_entry(rule, dims, *prefixes))
        if is_moe:
            entries += _expert_entries(dims, layout, *prefixes)
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


def held_entries(dims: ModelDims, layout: ParallelLayout) -> list[TensorEntry]:
    """Those of `stage_entries` whose parameter this rank has."""
    return [entry for entry in stage_entries(dims, layout) if entry.owner in (None, layout.ep_rank)]


def expected_hf_tensors(dims: ModelDims) -> dict[str, Shape]:
    """Name and shape of every tensor of the whole HF model."""
    whole = ParallelLayout(tp=1, pp=1, world_size=1, rank=0)
    entries = stage_entries(dims, whole)
    return {name: shape for e in entries for name, shape in zip(e.hf_names, e.hf_shapes, strict=True)}


def _expert_entries(dims: ModelDims, layout: ParallelLayout, param_prefix: str, hf_prefix: str) -> list[TensorEntry]:
    """All experts of a layer, by their number in the HF model: EP rank r has an unbroken run of them."""
    n_experts = _moe(dims).n_experts
    per_rank = n_experts // layout.ep
    return [
        _entry(
            rule,
            dims,
            f"{param_prefix}mlp.experts.local_experts.{expert % per_rank}.",
            f"{hf_prefix}mlp.experts.{expert}.",
            owner=expert // per_rank,
        )
        for expert in range(n_experts)
        for rule in _EXPERT_RULES
    ]


def _entry(
    rule: Rule, dims: ModelDims, param_prefix: str = "", hf_prefix: str = "", owner: int | None = None
) -> TensorEntry:
    hf_names = tuple(hf_prefix + name for name in rule.hf)
    return TensorEntry(param_prefix + rule.param, hf_names, rule.shapes(dims), rule.layout, owner=owner)


def _moe(dims: ModelDims) -> MoeDims:
    if dims.moe is None:
        raise ValueError(f"a {dims.model_type} model has no experts")
    return dims.moe
