"""Identify a tokenizer by its vocabulary. Used by the trainer and by the teacher server."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def tokenizer_fingerprint(vocab: Mapping[str, int]) -> str:
    """Return sha256 (hex) over the sorted (id, token) pairs, which identifies a vocabulary."""
    digest = hashlib.sha256()
    for token_id, token in sorted((token_id, token) for token, token_id in vocab.items()):
        raw = token.encode("utf-8", "surrogatepass")
        digest.update(f"{token_id}:{len(raw)}:".encode() + raw)
    return digest.hexdigest()
