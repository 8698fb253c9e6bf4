"""Identify a tokenizer by its vocabulary and its chat template. Used by the trainer and by the teacher server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

_EXAMPLE = {"role": "user", "content": "Hello!"}


def tokenizer_fingerprint(vocab: Mapping[str, int]) -> str:
    """Return sha256 (hex) over the sorted (id, token) pairs, which identifies a vocabulary."""
    digest = hashlib.sha256()
    for token_id, token in sorted((token_id, token) for token, token_id in vocab.items()):
        raw = token.encode("utf-8", "surrogatepass")
        digest.update(f"{token_id}:{len(raw)}:".encode() + raw)
    return digest.hexdigest()


def add_template(tokenizer: Any, folder: Path) -> None:
    """Give a tokenizer the template of chat_template.json, which transformers reads for processors of images alone."""
    file = folder / "chat_template.json"
    if tokenizer.chat_template is None and file.is_file():
        tokenizer.chat_template = json.loads(file.read_text())["chat_template"]


def template_fingerprint(chat_template: Any) -> str:
    """Return sha256 (hex) of a tokenizer's chat template, a text or named texts; empty if it has none."""
    if not chat_template:
        return ""
    text = repr(sorted(chat_template.items())) if isinstance(chat_template, Mapping) else str(chat_template)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def template_example(tokenizer: Any, variables: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the prompt that a tokenizer's chat template writes for a fixed message; without a template the message.

    Raises any error: a template is a program.
    """
    if tokenizer.chat_template is None:
        return _EXAMPLE["content"]
    text: str = tokenizer.apply_chat_template([_EXAMPLE], add_generation_prompt=True, tokenize=False, **variables)
    return text
