"""Is a checkpoint this student's? Asked before anything is loaded from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gkd.errors import CheckpointError


def check_same_student(
    folder: str | Path, saved: Mapping[str, Any], own: Mapping[str, Any], *, settings: Sequence[str], model: str
) -> None:
    """Raises CheckpointError naming the first thing in which the checkpoint's student is another one.

    Args:
        saved: the checkpoint's meta data.
        own: what this student would write; all of it but the step.
        settings: keys whose values must be equal.
        model: the key of what the model is made of, by name; must be equal, too.
    """
    if missing := {"step", *own} - saved.keys():
        raise CheckpointError(f"{folder} does not say of its student: {', '.join(sorted(missing))}.")
    for what in settings:
        if saved[what] != own[what]:
            raise CheckpointError(f"{folder} was saved with {what} = {saved[what]}, this student has {own[what]}.")
    for name in dict.fromkeys([*own[model], *saved[model]]):
        theirs, ours = saved[model].get(name, "nothing"), own[model].get(name, "nothing")
        if theirs != ours:
            raise CheckpointError(f"{folder} is of another model: {name} = {theirs}, this student has {ours}.")
