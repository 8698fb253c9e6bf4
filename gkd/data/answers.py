"""Responses as text, and the exact-match metric of greedy ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gkd.types import Prompt, Sample


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


def greedy_sample(tokenizer: Any, prompt: Prompt, response_ids: np.ndarray, *, truncated: bool, marker: str) -> Sample:
    """Return a greedy response, judged by exact match; a truncated one is not correct.

    Args:
        response_ids: [R] int32.
    """
    answer = prompt.answer or ""
    sample = as_text(tokenizer, prompt.prompt_id, prompt.token_ids, response_ids, truncated=truncated)
    return replace(sample, answer=answer, correct=not truncated and is_correct(sample.text, answer, marker))


def as_text(
    tokenizer: Any, prompt_id: int, prompt_ids: np.ndarray, response_ids: np.ndarray, *, truncated: bool
) -> Sample:
    """Return a response with its text, not judged.

    Args:
        prompt_ids, response_ids: [P] and [R] int32.
    """
    return Sample(
        prompt_id=prompt_id,
        prompt_ids=prompt_ids.tolist(),
        response_ids=response_ids.tolist(),
        text=tokenizer.decode(response_ids, skip_special_tokens=True),
        answer="",
        correct=None,
        prompt=tokenizer.decode(prompt_ids, skip_special_tokens=False),
        truncated=truncated,
    )
