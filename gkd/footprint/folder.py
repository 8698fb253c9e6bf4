"""A model folder as far as memory goes: its config.json, and the shapes in its safetensors files' headers.

Read here with nothing but the standard library, so that no torch is loaded for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gkd.errors import ConfigError, ModelError
from gkd.footprint.shapes import ModelShape, Tensors, read_shape
from gkd.hf.index import weight_files

_LARGEST_HEADER = 100 << 20  # bytes; the format's own limit


@dataclass(frozen=True, slots=True)
class ModelFolder:
    config_json: Mapping[str, Any]
    shape: ModelShape
    tensors: Tensors | None  # None: not needed


def read_model_folder(path: str | Path, key: str) -> ModelFolder:
    """Headers are read only where config.json does not tell the number of parameters.

    Args:
        key: what names the folder, for errors.

    Raises:
        ConfigError: it has no config.json that can be read.
        ModelError: a size is missing there, or a weight file is absent or damaged.
    """
    file = Path(path) / "config.json"
    try:
        config_json = json.loads(file.read_text())
    except OSError as error:
        problem = f"it has no config.json that can be read ({error.strerror})."
        raise ConfigError(key, str(path), problem, "name a local folder in Hugging Face format.") from error
    except ValueError as error:
        raise ConfigError(key, str(path), f"its config.json is not JSON ({error}).", "copy it again.") from error
    if not isinstance(config_json, dict):
        raise ConfigError(key, str(path), "its config.json holds no object.", "copy it again.")
    shape = read_shape(config_json)
    return ModelFolder(config_json, shape, None if shape.is_exact() else tensor_shapes(Path(path)))


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape by name of all tensors in the folder's files, those that are loaded. Raises ModelError as `weight_files`
    does, or for a damaged one.
    """
    files = weight_files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with file.open("rb") as stream:
                n_bytes = int.from_bytes(stream.read(8), "little")
                if n_bytes > _LARGEST_HEADER:
                    raise ValueError(f"a header of {n_bytes} bytes")
                header = json.loads(stream.read(n_bytes))
            for name, entry in header.items():
                if name != "__metadata__":
                    shapes[name] = tuple(int(size) for size in entry["shape"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{file} is not a readable safetensors file ({error}). Copy it again.") from error
    return shapes
