"""List the weight files of a HF folder, from its index or its single file. Pure: no torch, no safetensors."""

from __future__ import annotations

import json
from pathlib import Path

from gkd.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHOWN = 5  # names in one error message


def weight_files(folder: Path) -> list[Path]:
    """Return the paths of the weight files. Raises ModelError: none, a damaged index, or a file that is absent."""
    index = folder / INDEX_NAME
    if not index.is_file():
        if not (folder / SINGLE_NAME).is_file():
            raise ModelError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; convert the model to safetensors.")
        return [folder / SINGLE_NAME]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index ({error!r}). Copy it again.") from error
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(
            f"{index} lists files that are not in the folder: {some_names(absent)}. The copy is incomplete."
        )
    return [folder / name for name in names]


def some_names(names: list[str]) -> str:
    """Return the first names and the number of the others, for an error message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
