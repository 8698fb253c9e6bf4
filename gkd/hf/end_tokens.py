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
    generation, config = (_read(Path(path) / name) for name in ("generation_config.json", "config.json"))
    text = config.get("text_config")
    listed: Any = None
    for source in (generation, config, text if isinstance(text, dict) else {}):
        if listed is None:
            listed = source.get("eos_token_id")
    ids = set(listed if isinstance(listed, list) else [] if listed is None else [listed])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise ModelError(
            f"{path} has no end-of-sequence token, neither in generation_config.json nor in config.json nor in its "
            "tokenizer.",
            "add eos_token_id to generation_config.json.",
        )
    return sorted(ids)


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
