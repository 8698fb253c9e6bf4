"""Functions that get all responses to a prompt at once: `teacher.prompt_function` and `distill.response_weight`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gkd.config.schema_teacher import RESPONSE_WEIGHT
from gkd.data.row_files import decode_row
from gkd.user_code import finite_number, shown

TeacherPrompt = str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and the rollout.n responses of the student to it, in the order of their samples: what a function gets.

    Args:
        prompt: the student's, as the row has it: a text, or messages with role and content; without data.system_prompt.
        responses: without special tokens; of a trajectory the last turn.
        rewards: weighted sum of reward.functions; None: undecided, or there are no functions.
        finish_reasons: see `gkd.types.FINISH_REASONS`.
        messages: turns and observations; None without an environment.
        full_reward: the sum of the weights of reward.functions.
    """

    encoded_row: bytes  # see `gkd.data.row_files`
    prompt: TeacherPrompt
    responses: list[str]
    rewards: list[float | None]
    finish_reasons: list[str]
    messages: list[list[dict[str, Any]] | None]
    full_reward: float

    @property
    def row(self) -> dict[str, Any]:
        """All columns of the prompt's row."""
        return decode_row(self.encoded_row)[1]

    @property
    def correct(self) -> list[bool]:
        """Whether each response has at least half of the full reward, as for distill.response_weight."""
        return [reward is not None and reward >= self.full_reward / 2 for reward in self.rewards]

    @property
    def question(self) -> str:
        """The text of the prompt, or of its last message."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    def asking(self, text: str) -> TeacherPrompt:
        """Return the prompt with another text in place of `question`."""
        return text if isinstance(self.prompt, str) else [*self.prompt[:-1], {**self.prompt[-1], "content": text}]


def solved_sibling(group: Group) -> list[TeacherPrompt | None]:
    """Show the teacher a correct response to the same prompt, the next one after the response itself, as an example.

    None where no other response is correct. Source: arXiv:2601.20802.
    """
    n = len(group.responses)
    correct = group.correct
    prompts: list[TeacherPrompt | None] = []
    for i in range(n):
        solved = [group.responses[k % n] for k in range(i + 1, i + n) if correct[k % n]]
        text = "".join(["A correct answer to the question below is:\n\n", *solved[:1], "\n\n", group.question])
        prompts.append(group.asking(text) if solved else None)
    return prompts


def checked_result(key: str, n: int, returned: Any) -> list[Any] | str:
    """Return what a function returned for each response, or what is wrong with it.

    Args:
        key: of the function.
        n: responses of the group.
    """
    what = "factors" if key == RESPONSE_WEIGHT else "prompts"
    try:
        if isinstance(returned, str | bytes | Mapping):
            raise TypeError
        values = list(returned)
    except TypeError:
        return f"{shown(returned)}, not a list of {what}"
    if len(values) != n:
        return f"{len(values)} {what} for {n} responses"
    for i, value in enumerate(values):
        checked = _factor(value) if key == RESPONSE_WEIGHT else _prompt(value)
        if checked:
            return f"for response {i} {checked}"
    return [float(value) for value in values] if key == RESPONSE_WEIGHT else values


def _factor(value: Any) -> str:
    """Return what is wrong with a factor."""
    number = finite_number(value)
    return number if isinstance(number, str) else f"{number:g}, a factor below 0" if number < 0 else ""


def _prompt(value: Any) -> str:
    """Return what is wrong with a prompt; `gkd.data.prompts.RowReader.teacher_ids` reads it."""
    try:
        msgspec.convert(value, str | list[dict[str, Any]] | None)
        msgspec.msgpack.encode(value)  # the process sends it
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        return f"{shown(value)}, neither messages nor a text nor None ({error})"
    return ""
