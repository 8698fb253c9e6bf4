"""A model's config.json -> its sizes, and how many parameters of which kind a rank holds. Numbers only.

Exact for the architectures of actor.strategy megatron. For others, which fsdp2 takes, the sizes are looked up under
their usual names, and the number of parameters comes from the headers of the files.

Letters: H hidden size, D head size, F columns of an MLP, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from gkd.errors import ModelError

# model_type -> (norms on queries and keys, bias on q, k, v). tests/unit compares it with the Megatron backend's table.
EXACT: dict[str, tuple[bool, bool]] = {
    "qwen3": (True, False),
    "qwen2": (False, True),
    "llama": (False, False),
    "mistral": (False, False),
    "qwen3_moe": (True, False),
    "mixtral": (False, False),
}
_NAMES = {
    "vocab_size": ("vocab_size",),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "n_heads": ("num_attention_heads", "n_head", "num_heads"),
}
_FFN_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
# A tensor of a decoder layer has one of these and a number in its name.
_BLOCKS = frozenset({"layers", "h", "blocks", "block"})

Tensors = Mapping[str, tuple[int, ...]]  # shape by name, of a folder's files


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of a mixture."""

    n: int
    n_active: int  # a token goes through
    ffn: int
    layers: tuple[bool, ...]  # by layer: has it experts?


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes."""

    model_type: str
    vocab_size: int
    hidden: int
    ffn: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    experts: ExpertShape | None = None
    sliding_window: int | None = None  # tokens; of a mistral

    @property
    def mlp_columns(self) -> dict[str, tuple[int, ...]]:
        """By kind, for known architectures; see `gkd.config.check_parallel`."""
        if not self.is_exact():
            return {}
        experts = (self.experts.ffn,) if self.experts is not None else ()
        return {"MLP columns": (self.dense_ffn,), "expert columns": experts}

    @property
    def dense_ffn(self) -> int:
        """Columns of the MLPs without experts; 0 where there are none."""
        return 0 if self.experts is not None and all(self.experts.layers) else self.ffn

    @property
    def q_columns(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_columns(self) -> int:
        """Of the keys, and as many of the values."""
        return self.n_kv_heads * self.head_dim

    def is_exact(self) -> bool:
        """Do the formulas below know all of its parameters?"""
        return self.model_type in EXACT

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def embedding_params(self, tp: int = 1) -> int:
        """Rows of the embedding, or of an LM head, on one of `tp` ranks, padding included."""
        return -(-self.vocab_size // tp) * self.hidden

    def dense_params(self, layer: int, tp: int = 1) -> int:
        """Of one layer on one of `tp` ranks, all but the experts."""
        h, d = self.hidden, self.head_dim
        columns = self.q_columns + 2 * self.kv_columns
        n = h * columns + self.q_columns * h + (columns if self.qkv_bias else 0)
        n = n // tp + 2 * h + (2 * d if self.qk_norm else 0)
        if self.experts is not None and self.has_experts(layer):
            return n + self.experts.n * h  # the router
        return n + 3 * h * self.ffn // tp

    def expert_params(self, layer: int, ep: int = 1) -> int:
        """Of one layer's experts on one of `ep` ranks."""
        if self.experts is None or not self.has_experts(layer):
            return 0
        return 3 * self.hidden * self.experts.ffn * self.experts.n // ep

    @property
    def n_params(self) -> int:
        """Of the whole model, a shared embedding once."""
        layers = sum(self.dense_params(i) + self.expert_params(i) for i in range(self.n_layers))
        return layers + self.hidden + self.embedding_params() * (1 if self.tied else 2)


def read_shape(config_json: Mapping[str, Any]) -> ModelShape:
    """The sizes in a config.json.

    Raises:
        ModelError: it is not a model's, or a size is missing, of a wrong type, or absurd; names it.
    """
    model_type = str(config_json.get("model_type", ""))
    inner = config_json.get("text_config")
    config = {**config_json, **inner} if isinstance(inner, Mapping) else config_json
    sizes = {what: _size(config, names, model_type) for what, names in _NAMES.items()}
    hidden, n_heads, n_layers = sizes["hidden"], sizes["n_heads"], sizes["n_layers"]
    if n_layers > _MOST_LAYERS:
        raise ModelError(f"config.json of a {model_type} model: num_hidden_layers = {n_layers} is no number of layers.")
    kind, (qk_norm, qkv_bias) = model_type, EXACT.get(model_type, (False, False))
    if config.get("attention_bias") or config.get("mlp_bias"):
        model_type = f"{model_type} with biases"  # its parameters are counted in the files
    tied = config.get("tie_word_embeddings", _TIED.get(model_type, True))
    default = {"num_key_value_heads": n_heads, "head_dim": max(1, hidden // n_heads), **_DEFAULTS.get(kind, {})}
    default.setdefault("ffn", default.get("intermediate_size", 4 * hidden))
    n_kv_heads = _optional(config, "num_key_value_heads", default["num_key_value_heads"])
    if n_kv_heads > n_heads or kind in EXACT and n_heads % n_kv_heads:
        raise ModelError(
            f"config.json of a {kind} model: num_key_value_heads = {n_kv_heads} do not share {n_heads} heads."
        )
    window = _optional(config, "sliding_window", 0 if "sliding_window" in config else _MISTRAL_WINDOW, or_none=True)
    return ModelShape(
        model_type=model_type,
        ffn=next((_optional(config, name, 0) for name in _FFN_NAMES if config.get(name) is not None), default["ffn"]),
        n_kv_heads=n_kv_heads,
        head_dim=_optional(config, "head_dim", default["head_dim"]),
        tied=bool(tied),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        experts=_experts(config, kind, n_layers),
        sliding_window=(window or None) if kind == "mistral" else None,
        **sizes,
    )


# What config.json may leave out, because it is the default of the architecture in transformers.
_TIED = {"qwen2": False, "qwen3": False, "llama": False, "mistral": False, "qwen3_moe": False, "mixtral": False}
_DEFAULTS: dict[str, dict[str, int]] = {
    "qwen2": {"num_key_value_heads": 32, "intermediate_size": 22016},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "intermediate_size": 22016},
    "llama": {"intermediate_size": 11008},
    "mistral": {"num_key_value_heads": 8, "intermediate_size": 14336},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "intermediate_size": 14336},
    "qwen3_moe": {
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
_MISTRAL_WINDOW = 4096
_LARGEST, _MOST_LAYERS = 1 << 28, 1 << 14  # no model has more


def count(tensors: Tensors) -> tuple[int, int, int]:
    """Parameters of a folder's tensors: (all, of the largest decoder layer, of the embedding).

    Raises:
        ModelError: there is no embedding among them.
    """
    layers: dict[str, int] = {}
    embedding = total = 0
    for name, shape in tensors.items():
        n, words = prod(shape), name.split(".")
        total += n
        numbers = [i for i, word in enumerate(words) if word.isdecimal() and i and words[i - 1] in _BLOCKS]
        if numbers:
            block = ".".join(words[: numbers[0] + 1])
            layers[block] = layers.get(block, 0) + n
        elif len(shape) == 2:
            embedding = max(embedding, n)
    if not embedding:
        raise ModelError("the model's files hold no embedding, so its memory cannot be told.")
    return total, max(layers.values(), default=0), embedding


def _experts(config: Mapping[str, Any], model_type: str, n_layers: int) -> ExpertShape | None:
    default = _DEFAULTS.get(model_type, {})
    name = next((name for where in (config, default) for name in _EXPERT_NAMES if name in where), None)
    if name is None or (n := _optional(config, name, default.get(name, 0), or_none=True)) == 0:
        return None
    # null is 0: mixtral's experts have the size of its MLPs.
    ffn = _optional(config, "moe_intermediate_size", default.get("moe_intermediate_size", 0))
    ffn = ffn or _optional(config, "intermediate_size", default.get("intermediate_size", 0))
    active = _optional(config, "num_experts_per_tok", default.get("num_experts_per_tok", 2))
    step, dense = _optional(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(isinstance(layer, int) for layer in dense):
        raise ModelError(f"config.json of a {model_type} model: mlp_only_layers = {dense!r} is no list of layers.")
    if not (ffn and step and 0 < active <= n):
        problem = f"{n} experts of {ffn} columns, {active} of them active, in every layer of {step}"
        raise ModelError(f"config.json of a {model_type} model: {problem}.")
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(n_layers))
    return ExpertShape(n, active, ffn, layers) if any(layers) else None


_EXPERT_NAMES = ("num_experts", "num_local_experts")


def _size(config: Mapping[str, Any], names: tuple[str, ...], model_type: str) -> int:
    for name in names:
        if _is_size(config.get(name)):
            return int(config[name])
    problem = f"it has no usable size under {' or '.join(names)}"
    raise ModelError(f"config.json of a {model_type or 'nameless'} model: {problem}, so its memory cannot be told.")


def _optional(config: Mapping[str, Any], name: str, default: int, *, or_none: bool = False) -> int:
    """The default where it is left out or null. Raises ModelError for what is no size; 0 is one only with `or_none`."""
    value = config.get(name)
    if value is None:
        return default
    if not _is_size(value) and not (or_none and value == 0 and type(value) is int):
        raise ModelError(f"config.json: {name} = {value!r} is no size, so the model's memory cannot be told.")
    return int(value)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST
