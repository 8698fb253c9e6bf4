"""Functions of all responses to a prompt that tests name by their path; the worker processes import this file."""

from __future__ import annotations

import time
from typing import Any

from gkd.scoring.reward.groups import Group


def pass_rate(group: Group) -> list[float]:
    """Do what distill.response_weight=pass_rate does."""
    share = sum(group.correct) / len(group.correct)
    return [share * (1 - share)] * len(group.correct)


def from_column(group: Group) -> list[Any]:
    """Return what the column `t` of the row has."""
    return [group.row.get("t")] * len(group.responses)


def feedback(group: Group) -> list[Any]:
    """Show the teacher what is wrong with each response, and which of them the student ended."""
    group.responses.reverse()  # a copy of its own
    group.responses.reverse()
    errors = [f"{response}: reward {reward:g}" for response, reward in zip(group.responses, group.rewards, strict=True)]
    said = [
        f"{error}, {reason}, {group.row['hint']}" for error, reason in zip(errors, group.finish_reasons, strict=True)
    ]
    return [None if right else group.asking(text) for right, text in zip(group.correct, said, strict=True)]


def shortest(group: Group) -> list[Any]:
    """Show the teacher the first word of the shortest other response."""
    n = len(group.responses)
    others = [group.responses[:i] + group.responses[i + 1 :] for i in range(n)]
    words = [(min(other, key=len).split() or ["w3"])[0] for other in others]
    return [f"{word} {group.question}" for word in words]


def last_message(group: Group) -> list[Any]:
    return [f"{group.question} {messages[-1]['content']}" for messages in group.messages if messages]


def misbehave(group: Group) -> Any:
    """Do what the hint of the row demands."""
    n = len(group.responses)
    kind = group.row["hint"]
    if kind == "raise":
        raise ValueError("no such unit")
    if kind == "sleep":
        time.sleep(60)
    return {
        "few": [1.0] * (n - 1),
        "none": None,
        "text": "abc",
        "nan": [1.0] * (n - 1) + [float("nan")],
        "infinite": [float("inf")] * n,
        "negative": [-0.5] * n,
        "words": ["abc"] * n,
        "object": [{"role": "user", "content": "a"}] * n,
        "no_text": [[{"role": "user", "content": 3}]] * n,
        "no_json": [[{"role": "user", "content": object()}]] * n,
        "surrogate": ["\ud800"] * n,
        "answers": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * n,
        "marker": ["a<|im_end|>b"] * n,
        "empty": [""] * n,
        "long": ["a" * 200] * n,
    }[kind]


def of_two(prompt: str, responses: list[str]) -> list[float]:
    return [1.0] * len(responses)
