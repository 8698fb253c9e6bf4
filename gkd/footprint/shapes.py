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
        ModelError: it is not a model's, or lacks a size; names it.
    """
    model_type = str(config_json.get("model_type", ""))
    inner = config_json.get("text_config")
    config = {**config_json, **inner} if isinstance(inner, Mapping) else config_json
    sizes = {what: _size(config, names, model_type) for what, names in _NAMES.items()}
    hidden, n_heads, n_layers = sizes["hidden"], sizes["n_heads"], sizes["n_layers"]
    qk_norm, qkv_bias = EXACT.get(model_type, (False, False))
    if config.get("attention_bias") or config.get("mlp_bias"):
        model_type = f"{model_type} with biases"  # its parameters are counted in the files
    tied = config.get("tie_word_embeddings", _TIED.get(model_type, True))
    return ModelShape(
        model_type=model_type,
        ffn=next((int(config[name]) for name in _FFN_NAMES if _is_size(config.get(name))), 4 * hidden),
        n_kv_heads=int(config.get("num_key_value_heads") or n_heads),
        head_dim=int(config.get("head_dim") or _HEAD_DIM.get(model_type) or hidden // n_heads),
        tied=bool(tied),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        experts=_experts(config, model_type, n_layers),
        **sizes,
    )


# What config.json may leave out, because it is the default of the architecture in transformers.
_TIED = {"qwen2": False, "qwen3": False, "llama": False, "mistral": False, "qwen3_moe": False, "mixtral": False}
_HEAD_DIM = {"qwen3": 128}


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
    n = config.get("num_experts", config.get("num_local_experts"))
    if not _is_size(n):
        return None
    ffn = config.get("moe_intermediate_size") or config.get("intermediate_size")
    step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(n_layers))
    if not any(layers):
        return None
    active = config.get("num_experts_per_tok", 2)
    if not _is_size(ffn) or not _is_size(active):
        raise ModelError(f"config.json of a {model_type} model says nothing usable of its experts' sizes.")
    assert ffn is not None and n is not None
    return ExpertShape(int(n), int(active), int(ffn), layers)


def _size(config: Mapping[str, Any], names: tuple[str, ...], model_type: str) -> int:
    for name in names:
        if _is_size(config.get(name)):
            return int(config[name])
    problem = f"it has no positive number under {' or '.join(names)}"
    raise ModelError(f"config.json of a {model_type or 'nameless'} model: {problem}, so its memory cannot be told.")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
