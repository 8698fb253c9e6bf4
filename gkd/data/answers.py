"""Exact-match metric of validation responses."""

from __future__ import annotations


def final_answer(text: str, marker: str) -> str | None:
    """Return the text after the last `marker`, stripped; None without a marker."""
    _, found, answer = text.rpartition(marker)
    return answer.strip() if found else None


def is_correct(response: str, reference: str, marker: str) -> bool:
    """Return whether the final answers match exactly.

    The response must contain the marker. The reference may be a bare answer or a full solution with the marker.
    """
    expected = final_answer(reference, marker)
    return final_answer(response, marker) == (reference.strip() if expected is None else expected)
