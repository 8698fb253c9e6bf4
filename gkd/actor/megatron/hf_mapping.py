"""Map HF tensors to Megatron parameters, and load those of this rank from a HF folder, one tensor at a time.

One table has names, shapes, TP layouts and owners of experts. Layouts split and join the tensors. Import, export and
checkpoints use both.

Of a folder only this rank's experts, rows and columns are read, from the mapped file into the parameter. Every rank
first checks the headers of *all* tensors, so that a bad folder fails on all ranks and none hangs in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gkd.actor.megatron.layout import ParallelLayout
from gkd.errors import ModelError
from gkd.hf.families import FAMILIES
from gkd.hf.model_dims import ModelDims
from gkd.hf.model_folder import check_headers, open_tensors, some_names

# A Tensor or a safetensors slice: both read only the requested rows and columns.
Sliceable: TypeAlias = Any


class TensorLayout:
    """How one Megatron parameter is made from its HF tensors. Here it is one tensor, split along one dimension or none.

    Import: `TensorLayout.fill` reads one rank's part from HF tensors (or their slices on disk). Export:
    `TensorLayout.join` combines the parts of all TP ranks. Values are only copied, so a round trip is bit-exact.

    Args:
        partition_dim: dimension of the Megatron parameter that TP splits; None means every rank has all of it.
    """

    def __init__(self, partition_dim: int | None = 0) -> None:
        self.partition_dim = partition_dim

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        """Write this TP rank's part of the HF tensors `sources` into `param`, in Megatron's row order."""
        (source,), dim = sources, self.partition_dim
        if dim is None:
            param.copy_(source[:])
            return
        part = slice(tp_rank * param.shape[dim], (tp_rank + 1) * param.shape[dim])
        param.copy_(source[part] if dim == 0 else source[:, part])

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        """Return the full HF tensors of the parts of all TP ranks, [tp, *shape of the parameter]; may alias them."""
        if self.partition_dim is None or len(shards) == 1:
            return (shards[0],)
        return (shards.flatten(0, 1) if self.partition_dim == 0 else torch.cat(list(shards), dim=1),)


REPLICATED = TensorLayout(None)  # norms and routers
SPLIT_ROWS = TensorLayout(0)  # outputs: the second factor of a LoRA adapter; norms over all heads
SPLIT_COLUMNS = TensorLayout(1)  # inputs: the second matrix of attention and of the MLP


class SplitVocab(TensorLayout):
    """Split along the vocabulary; the last rows may be padding, zero here and absent in HF."""

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        rows = len(param)
        start = min(tp_rank * rows, dims.vocab_size)
        stop = min(start + rows, dims.vocab_size)
        param[: stop - start].copy_(sources[0][start:stop])
        param[stop - start :].zero_()

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        return (shards.flatten(0, 1)[: dims.vocab_size],)


class GatedMlp(TensorLayout):
    """HF gate and up projection; each rank holds [its rows of gate; its rows of up]."""

    def fill(self, param: Tensor, sources: Sequence[Sliceable], dims: ModelDims, tp: int, tp_rank: int) -> None:
        rows = len(param) // 2
        for half, source in zip(param.split(rows), sources, strict=True):
            half.copy_(source[tp_rank * rows : (tp_rank + 1) * rows])

    def join(self, shards: Tensor, dims: ModelDims) -> tuple[Tensor, ...]:
        gate, up = shards.chunk(2, dim=1)  # [tp, rows, hidden]
        return gate.flatten(0, 1), up.flatten(0, 1)


class GroupedQkv(TensorLayout):
    """HF q, k, v; per key/value head: its query heads, then its key, then its value. TP splits heads.

    Works for weights [rows, hidden] and biases [rows].
    """

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
        qkv = torch.split(grouped, [q_rows, dims.head_dim, dims.head_dim], dim=1)
        return tuple(part.reshape(-1, *part.shape[2:]) for part in qkv)


Shape: TypeAlias = tuple[int, ...]
WHOLE = ParallelLayout(tp=1, pp=1, world_size=1, rank=0)  # one rank has the whole model


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table. Names are relative to the model, the layer or the expert."""

    param: str
    hf: tuple[str, ...]
    layout: TensorLayout
    shapes: Callable[[ModelDims], tuple[Shape, ...]]  # shapes of the HF tensors
    when: Callable[[ModelDims], bool] = lambda dims: True  # whether a model of `dims` has this parameter


def _vocab_shape(d: ModelDims) -> tuple[Shape, ...]:
    return ((d.vocab_size, d.hidden_size),)


def _hidden_shape(d: ModelDims) -> tuple[Shape, ...]:
    return ((d.hidden_size,),)


def _per_head(d: ModelDims) -> tuple[Shape, ...]:
    return ((d.head_dim,),)


_EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), SplitVocab(), _vocab_shape)
_FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), REPLICATED, _hidden_shape)
_LM_HEAD = Rule("output_layer.weight", ("lm_head.weight",), SplitVocab(), _vocab_shape)

_LAYER_RULES = (
    Rule("input_layernorm.weight", ("input_layernorm.weight",), REPLICATED, _hidden_shape, lambda d: not d.post_norm),
    Rule(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        GroupedQkv(),
        lambda d: ((d.q_columns, d.hidden_size), (d.kv_columns, d.hidden_size), (d.kv_columns, d.hidden_size)),
    ),
    Rule(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        GroupedQkv(),
        lambda d: ((d.q_columns,), (d.kv_columns,), (d.kv_columns,)),
        when=lambda d: d.qkv_bias,
    ),
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), REPLICATED, _per_head, lambda d: d.qk_norm),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), REPLICATED, _per_head, lambda d: d.qk_norm),
    Rule(
        "self_attention.linear_proj.weight",
        ("self_attn.o_proj.weight",),
        SPLIT_COLUMNS,
        lambda d: ((d.hidden_size, d.q_columns),),
    ),
    Rule(
        "pre_mlp_layernorm.weight",
        ("post_attention_layernorm.weight",),
        REPLICATED,
        _hidden_shape,
        when=lambda d: not d.has_outer_norms,
    ),
    Rule(
        "pre_mlp_layernorm.weight",
        ("pre_feedforward_layernorm.weight",),
        REPLICATED,
        _hidden_shape,
        when=lambda d: d.is_gemma,
    ),
)

_OUTER_NORMS = (
    Rule("self_attn_bda.weight", ("post_attention_layernorm.weight",), REPLICATED, _hidden_shape),
    Rule("mlp_bda.weight", ("post_feedforward_layernorm.weight",), REPLICATED, _hidden_shape),
)

_NORMS_OF_ALL_HEADS = (
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), SPLIT_ROWS, lambda d: ((d.q_columns,),)),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), SPLIT_ROWS, lambda d: ((d.kv_columns,),)),
)

_MLP_RULES = (
    Rule(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        GatedMlp(),
        lambda d: ((d.ffn_size, d.hidden_size), (d.ffn_size, d.hidden_size)),
    ),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), SPLIT_COLUMNS, lambda d: ((d.hidden_size, d.ffn_size),)),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A rule applied to one parameter of one stage."""

    param: str  # full name in the stage's Megatron model, layers numbered from 0 in the stage; see `chunk_prefix`
    hf_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    layout: TensorLayout
    exported: bool = True  # False for the second copy of a tied embedding
    # The EP rank that holds this expert. On other EP ranks `param` names another expert of the same shape. None means
    # that the parameter does not belong to an expert.
    owner: int | None = None


def chunk_prefix(layout: ParallelLayout, chunk: int) -> str:
    """Return the prefix of the Megatron names of a chunk's parameters; empty if a stage has one chunk."""
    return f"chunk{chunk}." if layout.vpp > 1 else ""


def stage_entries(dims: ModelDims, layout: ParallelLayout) -> list[TensorEntry]:
    """Return every parameter of this pipeline stage, in model order; the same on all ranks of the stage."""
    return [entry for chunk in range(layout.vpp) for entry in _chunk_entries(dims, layout, chunk)]


def _chunk_entries(dims: ModelDims, layout: ParallelLayout, chunk: int) -> list[TensorEntry]:
    prefix = chunk_prefix(layout, chunk)
    entries = [_entry(_EMBEDDING, dims, prefix)] if layout.holds_embedding(chunk) else []
    for local, number in enumerate(layout.layer_range(dims, chunk)):
        prefixes = f"{prefix}decoder.layers.{local}.", f"model.layers.{number}."
        is_moe = dims.is_moe_layer(number)
        norms = (_NORMS_OF_ALL_HEADS if dims.post_norm else ()) + (_OUTER_NORMS if dims.has_outer_norms else ())
        for rule in (*_LAYER_RULES, *norms, *(_moe_rules(dims) if is_moe else _MLP_RULES)):
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


def _moe_rules(dims: ModelDims) -> list[Rule]:
    """Return the rules of a layer with experts, without these."""
    moe = dims.moe
    assert moe is not None
    name = FAMILIES[dims.model_type].expert_names[0]
    rules = [
        Rule("mlp.router.weight", (f"{name}.gate.weight",), REPLICATED, lambda d: ((moe.n_experts, d.hidden_size),))
    ]
    if moe.groups is not None:
        bias = ("mlp.gate.e_score_correction_bias",)
        rules.append(Rule("mlp.router.correction_bias", bias, REPLICATED, lambda d: ((moe.n_experts,),)))
    if moe.shared_size:
        hf = "mlp.shared_expert" if moe.shared_gate else "mlp.shared_experts"
        to = "mlp.shared_experts."
        gate, up, down = (f"{hf}.{part}_proj.weight" for part in ("gate", "up", "down"))
        inner = (moe.shared_size, dims.hidden_size)
        outer = (dims.hidden_size, moe.shared_size)
        rules.append(Rule(f"{to}linear_fc1.weight", (gate, up), GatedMlp(), lambda d: (inner, inner)))
        rules.append(Rule(f"{to}linear_fc2.weight", (down,), SPLIT_COLUMNS, lambda d: (outer,)))
        if moe.shared_gate:
            rules.append(Rule(f"{to}gate_weight", (f"{hf}_gate.weight",), REPLICATED, lambda d: ((1, d.hidden_size),)))
    return rules


def held_entries(dims: ModelDims, layout: ParallelLayout) -> list[TensorEntry]:
    """Return the entries of `stage_entries` whose parameter this rank holds."""
    return [entry for entry in stage_entries(dims, layout) if entry.owner in (None, layout.ep_rank)]


def expected_hf_tensors(dims: ModelDims) -> dict[str, Shape]:
    """Return name and shape of every tensor of the whole HF model."""
    entries = stage_entries(dims, WHOLE)
    return {name: shape for e in entries for name, shape in zip(e.hf_names, e.hf_shapes, strict=True)}


def _expert_entries(dims: ModelDims, layout: ParallelLayout, param_prefix: str, hf_prefix: str) -> list[TensorEntry]:
    """Return the entries of all experts of a layer, in HF order. Each EP rank holds consecutive experts."""
    moe = dims.moe
    assert moe is not None
    per_rank = moe.n_experts // layout.ep
    inner = (moe.ffn_size, dims.hidden_size)
    outer = (dims.hidden_size, moe.ffn_size)
    mlp, gate, up, down = FAMILIES[dims.model_type].expert_names
    rules = (  # names relative to an expert; TP does not split experts
        Rule("linear_fc1.weight", (f"{gate}.weight", f"{up}.weight"), GatedMlp(), lambda d: (inner, inner)),
        Rule("linear_fc2.weight", (f"{down}.weight",), SPLIT_COLUMNS, lambda d: (outer,)),
    )
    return [
        _entry(
            rule,
            dims,
            f"{param_prefix}mlp.experts.local_experts.{expert % per_rank}.",
            f"{hf_prefix}{mlp}.experts.{expert}.",
            owner=expert // per_rank,
        )
        for expert in range(moe.n_experts)
        for rule in rules
    ]


def _entry(
    rule: Rule, dims: ModelDims, param_prefix: str = "", hf_prefix: str = "", owner: int | None = None
) -> TensorEntry:
    hf_names = tuple(hf_prefix + name for name in rule.hf)
    return TensorEntry(param_prefix + rule.param, hf_names, rule.shapes(dims), rule.layout, owner=owner)


@torch.no_grad()
def load_hf_weights(
    model_path: str | Path, params: Mapping[str, torch.nn.Parameter], dims: ModelDims, layout: ParallelLayout
) -> None:
    """Fill `params` (Megatron names of this stage) in place from a HF folder, cast to their dtype.

    Raises:
        ModelError: files are missing or corrupt, or tensors are missing, unexpected or of the wrong shape or dtype.
    """
    folder = Path(model_path)
    entries = held_entries(dims, layout)
    if unfilled := set(params) ^ {entry.param for entry in entries}:
        raise ModelError(f"the mapping table and the Megatron model disagree on {some_names(sorted(unfilled))}")
    with open_tensors(folder) as tensors:
        _check_headers(folder, tensors, dims)
        for entry in entries:
            sources = [tensors[name].get_slice(name) for name in entry.hf_names]
            tp, tp_rank = (layout.tp, layout.tp_rank) if entry.owner is None else (1, 0)
            entry.layout.fill(params[entry.param].data, sources, dims, tp, tp_rank)


def check_weight_files(folder: Path, dims: ModelDims) -> None:
    """Check that the files are complete and hold exactly the tensors of `dims`. Reads headers only.

    Raises:
        ModelError: see `load_hf_weights`.
    """
    with open_tensors(folder) as tensors:
        _check_headers(folder, tensors, dims)


def _check_headers(folder: Path, tensors: Mapping[str, Any], dims: ModelDims) -> None:
    """Raise ModelError if the tensors of the files do not match the architecture."""

    def is_ignorable(name: str) -> bool:  # a known redundant tensor, which transformers ignores, too
        # GLM-4.5's layer for the prediction of further tokens follows the others. Exports copy it.
        is_next = dims.model_type == "glm4_moe" and name.startswith(f"model.layers.{dims.n_layers}.")
        return is_next or name.endswith("rotary_emb.inv_freq") or (dims.tied_embeddings and name == "lm_head.weight")

    check_headers(folder, tensors, expected_hf_tensors(dims), model_type=dims.model_type, is_ignorable=is_ignorable)
