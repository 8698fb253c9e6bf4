"""Identify a tokenizer by its vocabulary and its chat template. Used by the trainer and by the teacher server."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any


def tokenizer_fingerprint(vocab: Mapping[str, int]) -> str:
    """Return sha256 (hex) over the sorted (id, token) pairs, which identifies a vocabulary."""
    digest = hashlib.sha256()
    for token_id, token in sorted((token_id, token) for token, token_id in vocab.items()):
        raw = token.encode("utf-8", "surrogatepass")
        digest.update(f"{token_id}:{len(raw)}:".encode() + raw)
    return digest.hexdigest()


def template_fingerprint(chat_template: Any) -> str:
    """Return sha256 (hex) of a tokenizer's chat template, a text or named texts; empty if it has none."""
    if not chat_template:
        return ""
    text = repr(sorted(chat_template.items())) if isinstance(chat_template, Mapping) else str(chat_template)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
