"""Read the sizes of a decoder-only model from its config.json, and refuse what the run cannot split or compute.

Pure: no torch, no transformers. Sizes and parameter counts are exact for `FAMILIES`. Other models, which
actor.strategy=fsdp2 accepts, name their sizes in various ways: the usual names are tried, and their parameters are
counted in the weight files (`gkd.hf.model_folder`).

Letters: H hidden size, D head size, F columns of an MLP, E experts, V vocabulary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gkd.errors import ConfigError, ModelError
from gkd.hf.families import FAMILIES, OTHER, ROPE_TYPES, Family

_NAMES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "n_heads": ("num_attention_heads", "n_head", "num_heads"),
}
_FFN_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")

# No model has more.
_MAX_SIZE = 1 << 28
_MAX_LAYERS = 1 << 14


@dataclass(frozen=True, slots=True)
class MoeDims:
    """The expert layers of a mixture-of-experts model."""

    n_experts: int
    n_active: int  # experts that each token is routed to
    ffn_size: int  # intermediate size of one expert
    normalize_weights: bool  # the weights of a token's experts sum to 1
    layers: tuple[bool, ...]  # one per layer: True for experts, False for a dense MLP
    shared_size: int = 0  # columns of the MLP that computes every token in addition; 0: there is none
    shared_gate: bool = False  # a sigmoid of each token weights that MLP
    groups: tuple[int, int] | None = None  # sigmoid router: (groups of experts, those among which a token chooses)
    scale: float = 1.0  # factor of the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    """The sizes of a decoder-only model, and the number of parameters that follows from them."""

    model_type: str
    vocab_size: int  # without padding
    hidden_size: int
    ffn_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int  # sys.maxsize: no limit is known
    tied_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    post_norm: bool = False  # see `Family`
    scales_queries: bool = False  # see `Family`
    is_gemma: bool = False  # see `Family`
    sliding_window: int | None = None  # tokens that a token attends to, itself included, in layers with a window
    moe: MoeDims | None = None  # None: a dense model

    @property
    def is_exact(self) -> bool:
        """True if `n_params` and the counts below cover all parameters of this architecture."""
        return self.model_type in FAMILIES

    @property
    def n_experts(self) -> int:
        """Number of experts; 0 for a dense model."""
        return 0 if self.moe is None else self.moe.n_experts

    @property
    def shared_size(self) -> int:
        """Columns of the shared expert; 0 without one."""
        return 0 if self.moe is None else self.moe.shared_size

    @property
    def dense_ffn_size(self) -> int:
        """Columns of the MLPs without experts; 0 if every layer has experts."""
        return 0 if self.moe is not None and all(self.moe.layers) else self.ffn_size

    @property
    def mlp_columns(self) -> dict[str, tuple[int, ...]]:
        """Columns by kind of MLP, as `check_engine_split` reads them; empty unless `is_exact`."""
        if not self.is_exact:
            return {}
        experts = () if self.moe is None else (self.moe.ffn_size,)
        shared = {"columns of the shared expert": (self.shared_size,)}
        return {"MLP columns": (self.dense_ffn_size,), "expert columns": experts, **shared}

    @property
    def q_columns(self) -> int:
        """Columns of the query projection."""
        return self.n_heads * self.head_dim

    @property
    def kv_columns(self) -> int:
        """Columns of the key projection; the value projection has as many."""
        return self.n_kv_heads * self.head_dim

    @property
    def has_outer_norms(self) -> bool:
        """Return whether norms follow attention and MLP."""
        return self.post_norm or self.is_gemma

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether layer `layer`, counted from 0 over the whole model, routes tokens to experts."""
        return self.moe is not None and self.moe.layers[layer]

    def embedding_params(self, tp: int = 1) -> int:
        """Parameters of the embedding, or of the LM head, on one of `tp` ranks, padding included."""
        return -(-self.vocab_size // tp) * self.hidden_size

    def dense_params(self, layer: int, tp: int = 1) -> int:
        """Parameters of one layer on one of `tp` ranks, without its experts."""
        h = self.hidden_size
        columns = self.q_columns + 2 * self.kv_columns
        n = h * columns + self.q_columns * h + (columns if self.qkv_bias else 0)
        n = n // tp + (4 if self.is_gemma else 2) * h + (2 * self.head_dim if self.qk_norm else 0)
        n += (self.q_columns + self.kv_columns) // tp if self.post_norm else 0
        if self.moe is not None and self.is_moe_layer(layer):
            router = self.n_experts * h + (h if self.moe.shared_gate else 0)
            return n + router + 3 * h * self.shared_size // tp
        return n + 3 * h * self.ffn_size // tp

    def expert_params(self, layer: int, ep: int = 1) -> int:
        """Parameters of one layer's experts on one of `ep` ranks."""
        if self.moe is None or not self.is_moe_layer(layer):
            return 0
        return 3 * self.hidden_size * self.moe.ffn_size * self.moe.n_experts // ep

    @property
    def n_params(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        layers = sum(self.dense_params(i) + self.expert_params(i) for i in range(self.n_layers))
        return layers + self.hidden_size + self.embedding_params() * (1 if self.tied_embeddings else 2)


def read_dims(config_json: Mapping[str, Any]) -> ModelDims:
    """Return the sizes in a config.json.

    Args:
        config_json: the file's content, or a transformers config as a dictionary.

    Raises:
        ModelError: a size is missing, of a wrong type, or out of range; names it.
    """
    model_type = str(config_json.get("model_type", ""))
    inner = config_json.get("text_config")
    config = {**config_json, **inner} if isinstance(inner, Mapping) else config_json
    sizes = {name: _required(config, keys, model_type) for name, keys in _NAMES.items()}
    hidden_size = sizes["hidden_size"]
    n_heads = sizes["n_heads"]
    n_layers = sizes["n_layers"]
    if n_layers > _MAX_LAYERS:
        raise ModelError(f"config.json of a {model_type} model: num_hidden_layers = {n_layers} is out of range.")
    kind = model_type
    family = FAMILIES.get(model_type, OTHER)
    if config.get("attention_bias") and family.qkv_bias != "attention_bias" or config.get("mlp_bias"):
        model_type = f"{model_type} with biases"  # inexact: its parameters are counted in the files
    # An architecture's default applies to a key that is left out; null stands for the generic value.
    family_defaults = {key: value for key, value in family.defaults.items() if key not in config}
    default = {"num_key_value_heads": n_heads, "head_dim": max(1, hidden_size // n_heads), **family_defaults}
    n_kv_heads = _optional(config, "num_key_value_heads", default["num_key_value_heads"])
    if n_kv_heads > n_heads or kind in FAMILIES and n_heads % n_kv_heads:
        raise ModelError(
            f"config.json of a {kind} model: num_key_value_heads = {n_kv_heads} does not divide {n_heads} heads."
        )
    ffn_size = next((_optional(config, name, 0) for name in _FFN_NAMES if config.get(name) is not None), 0)
    longest = config.get("max_position_embeddings", default.get("max_position_embeddings"))
    default_window = 0 if "sliding_window" in config else family.default_window or 0
    window = _optional(config, "sliding_window", default_window, or_zero=True)
    return ModelDims(
        model_type=model_type,
        ffn_size=ffn_size or default.get("intermediate_size", 4 * hidden_size),
        n_kv_heads=n_kv_heads,
        head_dim=_optional(config, "head_dim", default["head_dim"]),
        max_positions=longest if isinstance(longest, int) and _is_size(longest) else sys.maxsize,
        tied_embeddings=bool(config.get("tie_word_embeddings", default.get("tie_word_embeddings", family is OTHER))),
        qk_norm=_has(config, family, family.qk_norm),
        qkv_bias=_has(config, family, family.qkv_bias),
        post_norm=family.post_norm,
        scales_queries=family.scales_queries,
        is_gemma=family.is_gemma,
        moe=_moe(config, kind, n_layers),
        sliding_window=None if family.default_window is None else window or None,
        **sizes,
    )


def attention_length(config_json: Mapping[str, Any]) -> float:
    """Return the tokens of a sequence whose causal scores take as many operations as its linear layers.

    Infinite for a model without full attention.

    With P weights of the layers that a token uses, A layers of full attention and Q query columns, a sequence of L
    tokens takes 2 P L + 2 A Q L^2 operations: L = P / (A Q).

    Raises:
        ModelError: as `read_dims`.
    """
    dims = read_dims(config_json)
    inner = config_json.get("text_config")
    kinds = {**config_json, **(inner if isinstance(inner, Mapping) else {})}.get("layer_types")
    n_full = kinds.count("full_attention") if isinstance(kinds, list) else dims.n_layers
    share = 0.0 if dims.moe is None else dims.moe.n_active / dims.n_experts
    linear = sum(dims.dense_params(i) + share * dims.expert_params(i) for i in range(dims.n_layers))
    return linear / (n_full * dims.q_columns) if n_full else math.inf


def _moe(config: Mapping[str, Any], model_type: str, n_layers: int) -> MoeDims | None:
    """Return None if every layer is dense. Raises ModelError: a size or a list of layers is not valid."""
    family = FAMILIES.get(model_type, OTHER)
    default = family.defaults
    names = ("n_routed_experts" if family.sigmoid_router else "num_experts", "num_local_experts")
    name = next((name for where in (config, default) for name in names if name in where), None)
    if name is None or (n := _optional(config, name, default.get(name, 0), or_zero=True)) == 0:
        return None
    step = _optional(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(isinstance(layer, int) for layer in dense):
        raise ModelError(f"config.json of a {model_type} model: mlp_only_layers = {dense!r} is not a list of layers.")
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(n_layers))
    if family.sigmoid_router:
        n_dense = _optional(config, "first_k_dense_replace", default["first_k_dense_replace"], or_zero=True)
        layers = tuple(layer >= n_dense for layer in range(n_layers))
    # A null counts as left out: the experts of a mixtral have the size of its MLPs.
    ffn_size = _optional(config, "moe_intermediate_size", default.get("moe_intermediate_size", 0))
    ffn_size = ffn_size or _optional(config, "intermediate_size", default.get("intermediate_size", 0))
    n_active = _optional(config, "num_experts_per_tok", default.get("num_experts_per_tok", 2))
    if not ffn_size:
        raise ModelError(f"config.json of a {model_type} model: moe_intermediate_size is missing.")
    if n_active > n:
        raise ModelError(
            f"config.json of a {model_type} model: num_experts_per_tok = {n_active} is not in 1 .. {name} = {n}."
        )
    normalizes = family.normalizes_experts or _has(config, family, "norm_topk_prob")
    shared_key = "shared_expert_intermediate_size"
    gated = shared_key in default
    shared_size = _optional(config, shared_key, default[shared_key]) if gated else 0
    moe = MoeDims(n, n_active, ffn_size, normalizes, layers, shared_size, gated)
    if family.sigmoid_router:
        n_shared, *groups = (_optional(config, k, default[k]) for k in ("n_shared_experts", "n_group", "topk_group"))
        scale = config.get("routed_scaling_factor", 1.0)
        fits = n % groups[0] == 0 and n >= 2 * groups[0]
        if not (fits and n_active * groups[0] <= n * groups[1] <= n * groups[0] and isinstance(scale, int | float)):
            grouping = f"n_group = {groups[0]}, topk_group = {groups[1]}, routed_scaling_factor = {scale!r}"
            raise ModelError(f"config.json of a {model_type} model: {grouping} do not fit {n_active} of {n} experts.")
        moe = replace(moe, shared_size=n_shared * ffn_size, groups=(groups[0], groups[1]), scale=float(scale))
    return moe if any(layers) else None


def _has(config: Mapping[str, Any], family: Family, feature: bool | str) -> bool:
    """Return whether a model has a feature of its family."""
    return feature if isinstance(feature, bool) else bool(config.get(feature, family.defaults.get(feature, False)))


def _required(config: Mapping[str, Any], names: tuple[str, ...], model_type: str) -> int:
    for name in names:
        if _is_size(config.get(name)):
            return int(config[name])
    raise ModelError(f"config.json of a {model_type or 'nameless'} model: no positive integer at {' or '.join(names)}.")


def _optional(config: Mapping[str, Any], name: str, default: int, *, or_zero: bool = False) -> int:
    """Return the default for a key that is missing or null.

    Raises:
        ModelError: the value is not a positive integer (0 is accepted with `or_zero`).
    """
    value = config.get(name)
    if value is None:
        return default
    if not _is_size(value) and not (or_zero and value == 0 and type(value) is int):
        raise ModelError(f"config.json: {name} = {value!r} is not a positive integer in range.")
    return int(value)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_SIZE


def check_expert_ranks(ep: int, ranks_of_stage: int) -> None:
    """Raise ConfigError if actor.ep does not divide the ranks of a pipeline stage."""
    if ranks_of_stage % ep:
        problem = f"does not divide the {ranks_of_stage} ranks of a pipeline stage, which share the experts."
        fix = f"Choose a divisor of {ranks_of_stage}, or change the number of GPUs of the actor pool."
        raise ConfigError("actor.ep", ep, problem, fix)


def check_actor_split(
    dims: ModelDims, *, tp: int, pp: int, vpp: int, ep: int, sequence_parallel: bool, layers: str = "auto"
) -> None:
    """Raise ConfigError naming the parallel size that does not divide the model, or layers that do not fit it."""
    if layers == "te" and dims.has_outer_norms:
        problem = (
            f"a {dims.model_type} model has norms after attention and MLP, which Transformer Engine's layers lack."
        )
        raise ConfigError("actor.layers", "te", problem, "use auto.")
    if ep > 1 and not dims.n_experts:
        raise ConfigError("actor.ep", ep, f"the model ({dims.model_type}) has no experts.", "Use 1.")
    for key, size, what, count in (
        ("actor.ep", ep, "experts", dims.n_experts),
        ("actor.tp", tp, "attention heads", dims.n_heads),
        ("actor.tp", tp, "key/value heads", dims.n_kv_heads),
        ("actor.tp", tp, "MLP columns", dims.dense_ffn_size),
        ("actor.tp", tp, "columns of the shared expert", dims.shared_size),
        ("actor.pp", pp, "layers", dims.n_layers),
    ):
        if count % size:
            problem = f"does not divide the model's {count} {what}."
            raise ConfigError(key, size, problem, f"Choose a divisor of {count}.")
    if dims.n_layers % (pp * vpp):
        problem = f"actor.pp * actor.vpp = {pp} * {vpp} does not divide the model's {dims.n_layers} layers."
        raise ConfigError("actor.vpp", vpp, problem, f"Choose a divisor of {dims.n_layers // pp}.")
    if dims.n_experts and tp > 1 and not sequence_parallel:
        problem = f"a mixture of experts with actor.tp > 1 needs actor.sequence_parallel=true (actor.tp is {tp})."
        raise ConfigError("actor.sequence_parallel", False, problem, "Set it, or use actor.tp=1 and actor.ep.")


def check_context_split(cp: int, heads: Sequence[int], kv_heads: Sequence[int]) -> None:
    """Raise ConfigError if `cp` ranks cannot share the heads of a tensor-parallel rank. Unknown counts are empty."""
    for count in heads:
        if count % cp:
            problem = f"does not divide the {count} attention heads of a tensor-parallel rank."
            raise ConfigError("actor.cp", cp, problem, f"Choose a divisor of {count}.")
    for count in kv_heads:
        if count % cp and cp % count:
            problem = f"is neither a divisor nor a multiple of the {count} key/value heads of a tensor-parallel rank."
            raise ConfigError("actor.cp", cp, problem, f"Choose a divisor of {count}.")


def check_engine_split(
    tp: int, heads: Sequence[int], kv_heads: Sequence[int], columns: Mapping[str, Sequence[int]]
) -> None:
    """Raise ConfigError if `tp` ranks of an engine cannot split the student. Unknown counts are empty."""
    for what, counts in {"attention heads": heads, **columns}.items():
        for count in counts:
            if count % tp:
                problem = f"does not divide the student's {count} {what}."
                raise ConfigError("rollout.tp", tp, problem, f"use a divisor of {count}.")
    for count in kv_heads:
        if count % tp and tp % count:
            problem = f"is neither a divisor nor a multiple of the student's {count} key/value heads."
            raise ConfigError("rollout.tp", tp, problem, "lower it.")


_OTHER_BACKEND = "set actor.strategy=fsdp2, which takes any causal language model."
# Key of config.json -> why the Megatron student does not compute its models.
_NOT_IN_MEGATRON = {
    "linear_key_head_dim": "Megatron-core 0.16 computes gated delta nets with Transformer Engine alone, and no packs",
    "kv_lora_rank": "Megatron-core 0.16 computes packs of latent attention with Transformer Engine alone",
}


def check_megatron_support(config_json: Mapping[str, Any], where: str = "config.json") -> None:
    """Refuse a model that the Megatron student would compute otherwise than transformers does.

    The load-balancing loss of a mixture of experts (router_aux_loss_coef) is not a part of distillation. The loss is
    the configured divergence alone, as in transformers without output_router_logits; a config that sets it is refused.

    Raises:
        ModelError: the architecture or a feature is not supported; names it.
    """
    model_type = config_json.get("model_type", "")
    strategy = "actor.strategy=megatron"
    if model_type not in FAMILIES:
        text = config_json.get("text_config") or config_json
        reason = next((f": {why}. S" for key, why in _NOT_IN_MEGATRON.items() if text.get(key)), "; s")
        raise ModelError(
            f"{where}: model_type {model_type!r} is not supported by {strategy}{reason}upported are "
            f"{', '.join(FAMILIES)}.",
            "set actor.strategy=fsdp2 and, if you trust the code in the folder, model.trust_remote_code=true."
            if "auto_map" in config_json
            else _OTHER_BACKEND,
        )
    supported: dict[str, Any] = {
        "use_sliding_window": False,
        "attention_bias": False,
        "attention_out_bias": False,
        "mlp_bias": False,
        "router_jitter_noise": 0.0,
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    family = FAMILIES[model_type]
    supported |= {"hidden_activation": "gelu_pytorch_tanh"} if family.is_gemma else {"hidden_act": "silu"}
    if family.qkv_bias == "attention_bias":
        del supported["attention_bias"]
    for key, value in supported.items():
        saved_value = config_json.get(key, value)
        if (saved_value or value) != value:
            problem = f"{where}: {key} = {saved_value!r} is not supported by {strategy}, only {value!r}."
            raise ModelError(problem, _OTHER_BACKEND)
    kinds = ("full_attention", *(("sliding_attention",) if family.is_gemma else ()))
    if any(kind not in kinds for kind in config_json.get("layer_types") or ()):
        problem = f"{where}: layer_types has others than {' and '.join(kinds)}, which {strategy} computes."
        raise ModelError(problem, _OTHER_BACKEND)
    rope = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}
    ropes = [each for each in rope.values() if isinstance(each, Mapping)] or [rope]  # one for each type of layer
    rotated = {each.get("partial_rotary_factor", config_json.get("partial_rotary_factor")) for each in ropes}
    is_partial = not rotated <= {None, 1.0} and not family.is_partly_rotated
    if not all(_computes_rope(family, each) for each in ropes) or is_partial:
        raise ModelError(
            f"{where}: rope_parameters {rope!r} is not supported by {strategy}; "
            f"supported rope_type: {', '.join(ROPE_TYPES)}, without partial rotation"
            f"{'; yarn with mscale = mscale_all_dim, and llama_4_scaling_beta' * family.scales_queries}.",
            _OTHER_BACKEND,
        )
    moe = read_dims(config_json).moe
    if moe is None:
        return
    if config_json.get("output_router_logits"):
        raise ModelError(
            f"{where}: output_router_logits = True adds the router's load-balancing loss, which distillation does not "
            "have.",
            "set output_router_logits to false in config.json.",
        )
    if moe.n_active == 1 and moe.normalize_weights:
        raise ModelError(
            f"{where}: norm_topk_prob = True with num_experts_per_tok = 1 weights every expert with 1, so its router "
            "cannot learn.",
            "choose another model." if family.normalizes_experts else "set norm_topk_prob to false in config.json.",
        )


def _computes_rope(family: Family, rope: Mapping[str, Any]) -> bool:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not family.scales_queries or not rope:  # transformers sets all values if config.json has none
        return kind in ROPE_TYPES
    # Another attention_factor than 1 would scale queries and keys.
    is_plain = rope.get("attention_factor", bool(rope.get("mscale")) and rope["mscale"] == rope.get("mscale_all_dim"))
    has_scale = isinstance(rope.get("llama_4_scaling_beta"), int | float)
    has_scale = has_scale and _is_size(rope.get("original_max_position_embeddings"))
    return has_scale and (kind in ROPE_TYPES or (kind == "yarn" and is_plain == 1))
