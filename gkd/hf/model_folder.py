"""Read a model folder without loading it: config.json, and tensor shapes from the headers of its safetensors files.

Uses only the standard library, so that no process imports torch for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from gkd.errors import ConfigError, ModelError
from gkd.hf.files import read_json, tensor_shapes
from gkd.hf.hub import local_path
from gkd.hf.model_dims import ModelDims, read_dims

Tensors: TypeAlias = Mapping[str, tuple[int, ...]]  # shape by tensor name

# The name of a decoder layer's tensor has one of these words, followed by a number.
_BLOCKS = frozenset({"layers", "h", "blocks", "block"})


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Data of a model folder that a memory estimate reads."""

    config_json: Mapping[str, Any]
    dims: ModelDims
    tensors: Tensors | None  # None: `dims` are exact


def read_model_folder(path: str | Path, key: str) -> ModelFolder:
    """Read config.json and, only if it does not determine the number of parameters, the headers of the weight files.

    Args:
        path: a Hugging Face folder, or a model's name on the hub. Weights are downloaded if they are read.
        key: the setting or flag that names the model, for errors.

    Raises:
        ConfigError: the folder has no readable config.json; or as `local_path`.
        ModelError: a size is missing in it, or a weight file is absent or damaged.
    """
    config_json = read_config_json(local_path(str(path), key, weights=False), key)
    dims = read_dims(config_json)
    return ModelFolder(config_json, dims, None if dims.is_exact else tensor_shapes(Path(local_path(str(path), key))))


def read_config_json(path: str | Path, key: str) -> dict[str, Any]:
    """Return the content of the folder's config.json. Raises ConfigError naming `key` if it cannot be read."""
    try:
        return read_json(Path(path) / "config.json")
    except ModelError as error:
        raise ConfigError(key, str(path), error.problem, error.fix) from error


def count_params(tensors: Tensors) -> tuple[int, int, int]:
    """Return the parameters of a folder's tensors: (all, of the largest decoder layer, of the embedding).

    Raises:
        ModelError: no tensor is an embedding.
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
        raise ModelError("the model's weight files have no embedding, so its memory cannot be estimated.")
    return total, max(layers.values(), default=0), embedding


def eos_token_ids(path: str, tokenizer: Any) -> list[int]:
    """Return the tokens of generation_config.json or, if it has none, of config.json; and the tokenizer's own.

    Raises:
        ModelError: the model defines none, or a file is damaged.
    """
    files = (Path(path) / name for name in ("generation_config.json", "config.json"))
    generation, config = (read_json(file) if file.is_file() else {} for file in files)
    sources = (generation, config, config.get("text_config") or {})
    found: Any = next((each for source in sources if (each := source.get("eos_token_id")) is not None), [])
    ids: set[int] = set(found if isinstance(found, list) else [found])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise ModelError(
            f"{path} has no end-of-sequence token in generation_config.json, config.json or its tokenizer.",
            "add eos_token_id to generation_config.json.",
        )
    return sorted(ids)
