"""Is an answer right: the exact-match metric of held-out evaluation."""

from __future__ import annotations


def final_answer(text: str, marker: str) -> str | None:
    """What stands behind the last `marker`, stripped; None without a marker."""
    _, found, answer = text.rpartition(marker)
    return answer.strip() if found else None


def is_correct(response: str, reference: str, marker: str) -> bool:
    """Exact match. The response must hold the marker; the reference may be the bare answer or a worked one."""
    wanted = final_answer(reference, marker)
    return final_answer(response, marker) == (reference.strip() if wanted is None else wanted)
