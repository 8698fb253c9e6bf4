"""Responses as text, and the exact-match metric of greedy ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from gkd.types import Rollout, Sample


def final_answer(text: str, marker: str) -> str | None:
    """Return the text after the last `marker`, stripped; None without a marker."""
    _, separator, answer = text.rpartition(marker)
    return answer.strip() if separator else None


def is_correct(response: str, reference: str, marker: str) -> bool:
    """Return whether the final answers match exactly.

    The response must contain the marker. The reference may be a bare answer or a full solution with the marker.
    """
    expected = final_answer(reference, marker)
    return final_answer(response, marker) == (reference.strip() if expected is None else expected)


def greedy_sample(tokenizer: Any, rollout: Rollout, answer: str, marker: str) -> Sample:
    """Return a greedy response; it is correct if it is not truncated, and its last turn matches `answer` exactly."""
    sample = as_text(tokenizer, rollout)
    text = tokenizer.decode(rollout.last_turn, skip_special_tokens=True)
    return replace(sample, answer=answer, correct=not sample.truncated and is_correct(text, answer, marker))


def as_text(tokenizer: Any, rollout: Rollout) -> Sample:
    """Return a response with its text, not judged."""
    return Sample(
        prompt_id=rollout.prompt_id,
        prompt_ids=rollout.prompt_ids.tolist(),
        response_ids=rollout.response_ids.tolist(),
        text=tokenizer.decode(rollout.response_ids, skip_special_tokens=True),
        answer="",
        correct=None,
        prompt=tokenizer.decode(rollout.prompt_ids, skip_special_tokens=False),
        truncated=rollout.finish_reason == "length",
        messages=msgspec.json.decode(rollout.messages) if rollout.messages is not None else [],
        observed=[] if rollout.own is None else np.flatnonzero(~rollout.own).tolist(),
        reward=rollout.reward,
        failed=rollout.finish_reason == "environment_error",
    )
