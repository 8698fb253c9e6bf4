"""Functions that get all responses to a prompt at once: `teacher.prompt_function` and `distill.response_weight`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gkd.config.schema_teacher import PROMPT_FUNCTION
from gkd.data.row_files import decode_row
from gkd.user_code import finite_number, shown

Prompts = list[str | list[dict[str, Any]] | None]  # of the teacher; None: the student's own


@dataclass(frozen=True, slots=True)
class Group:
    """Hold a prompt and the rollout.n responses of the student to it, in the order of their samples.

    Args:
        prompt: the student's, as the row has it: a text, or messages with role and content; without data.system_prompt.
        responses: without special tokens; of a trajectory the last turn.
        rewards: weighted sum of reward.functions; None: undecided, or there are no functions.
        finish_reasons: see `gkd.types.FINISH_REASONS`.
        messages: turns and observations; None without an environment.
        full_reward: the sum of the weights of reward.functions.
    """

    encoded_row: bytes  # see `gkd.data.row_files`
    prompt: str | list[dict[str, Any]]
    responses: list[str]
    rewards: list[float | None]
    finish_reasons: list[str]
    messages: list[list[dict[str, Any]] | None]
    full_reward: float

    @property
    def row(self) -> dict[str, Any]:
        """Return all columns of the prompt's row."""
        return decode_row(self.encoded_row)[1]

    @property
    def correct(self) -> list[bool]:
        """Return whether each response has at least half of the full reward, as for distill.response_weight."""
        return [reward is not None and reward >= self.full_reward / 2 for reward in self.rewards]

    @property
    def question(self) -> str:
        """Return the text of the prompt, or of its last message."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    def asking(self, text: str) -> str | list[dict[str, Any]]:
        """Return the prompt with another text in place of `question`."""
        return text if isinstance(self.prompt, str) else [*self.prompt[:-1], {**self.prompt[-1], "content": text}]


def solved_sibling(group: Group) -> Prompts:
    """Return for each response a prompt with the next correct response as an example, or None. arXiv:2601.20802."""
    n = len(group.responses)
    correct = group.correct
    prompts: Prompts = []
    for i in range(n):
        solved = [group.responses[k % n] for k in range(i + 1, i + n) if correct[k % n]]
        text = "".join(["A correct answer to the question below is:\n\n", *solved[:1], "\n\n", group.question])
        prompts.append(group.asking(text) if solved else None)
    return prompts


def checked_result(key: str, n: int, returned: Any) -> list[Any] | str:
    """Return what the function of a key returned for each of n responses, or what is wrong with it."""
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__iter__"):
        return f"{shown(returned)}, not a list"
    values = list(returned)
    if len(values) != n:
        return f"{len(values)} values for {n} responses"
    for value in values:
        if problem := _prompt_problem(value) if key == PROMPT_FUNCTION else _factor_problem(value):
            return problem
    return values if key == PROMPT_FUNCTION else [float(value) for value in values]


def _factor_problem(value: Any) -> str:
    number = finite_number(value)
    return number if isinstance(number, str) else f"{number:g}, a factor below 0" if number < 0 else ""


def _prompt_problem(value: Any) -> str:
    """Return why a value cannot be sent as a prompt; `gkd.data.prompts.RowReader.teacher_ids` reads it."""
    try:
        msgspec.msgpack.encode(msgspec.convert(value, str | list[dict[str, Any]] | None))
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        return f"{shown(value)}, neither messages nor a text nor None ({error})"
    return ""
