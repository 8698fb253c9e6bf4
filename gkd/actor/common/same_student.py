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


def check_trained(folder: str | Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise CheckpointError if one student trains adapters and the other one does not, or they train different ones.

    Args:
        saved, own: meta data. `base`: digest of frozen weights; empty or missing without adapters. `shapes`: of all
            trained tensors by name; may be missing without adapters.
    """
    bases = saved.get("base", ""), own.get("base", "")
    if not all(bases) and any(bases):
        adapters, weights = ("the checkpoint", "this student") if bases[0] else ("this student", "the checkpoint")
        raise CheckpointError(
            f"{folder} belongs to another student: {adapters} trains adapters, {weights} all weights. Fix: use the "
            "actor.lora.rank of the checkpoint."
        )
    if bases[0] != bases[1]:
        raise CheckpointError(
            f"{folder} holds adapters of another base model than model.path. Fix: set model.path to the base model of "
            "the checkpoint."
        )
    theirs = saved.get("shapes", own.get("shapes", {}))
    ours = own.get("shapes", theirs)
    for one, other, side in ((theirs, ours, "this student"), (ours, theirs, "the checkpoint")):
        if missing := sorted(one.keys() - other.keys()):
            raise CheckpointError(
                f"{folder} belongs to another student: {side} does not train {missing[0]}. Fix: use the model.path, "
                "actor.lora.rank and actor.lora.targets of the checkpoint."
            )
