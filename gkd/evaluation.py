"""Is an answer right: the exact-match metric of held-out evaluation."""

from __future__ import annotations


def final_answer(text: str, marker: str) -> str:
    """What stands behind the last `marker` (all of the text if there is none), stripped."""
    return text.rpartition(marker)[2].strip()


def is_correct(response: str, reference: str, marker: str) -> bool:
    """Exact match; the reference may be the bare answer or a worked one that ends the same way."""
    return final_answer(response, marker) == final_answer(reference, marker)
