"""Check that a checkpoint belongs to this student, before anything is loaded from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gkd.errors import CheckpointError


def check_same_student(
    folder: str | Path, saved: Mapping[str, Any], own: Mapping[str, Any], *, settings: Sequence[str], model: str
) -> None:
    """Raise CheckpointError that names the first difference between the checkpoint's student and this one.

    Args:
        saved: the checkpoint's meta data.
        own: this student's meta data, without the step.
        settings: keys whose values must be equal.
        model: key of the model's tensors by name, which must be equal, too.
    """
    if missing := {"step", *own} - saved.keys():
        raise CheckpointError(f"{folder} has no {', '.join(sorted(missing))} in its meta data.")
    for key in settings:
        if saved[key] != own[key]:
            raise CheckpointError(f"{folder} was saved with {key} = {saved[key]}, this student has {own[key]}.")
    for name in dict.fromkeys([*own[model], *saved[model]]):
        in_checkpoint, here = saved[model].get(name, "missing"), own[model].get(name, "missing")
        if in_checkpoint != here:
            raise CheckpointError(f"{folder} has a different model: {name} = {in_checkpoint}, this student has {here}.")
