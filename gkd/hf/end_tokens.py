"""Find the tokens that end a response, as transformers and vLLM do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gkd.errors import ModelError
from gkd.hf.index import read_json


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
