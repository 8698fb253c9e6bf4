"""Refresh a frozen model from a trained one, one tensor at a time: a teacher that follows its student."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gkd.actor.fsdp.weights import Place, blend_part
from gkd.errors import ModelError
from gkd.hf.folder import TensorPlan
from gkd.hf.index import some_names


def check_plan(places: Mapping[str, Place], plan: Sequence[TensorPlan]) -> None:
    """Check that `blend` accepts these tensors. Raises ModelError: names tensors that only one of the models has."""
    required = {part.name: part.shape for place in places.values() for part in place.parts}
    given = {name: tuple(shape) for name, shape, _ in plan}
    if missing := sorted(required.keys() - given.keys()):
        raise ModelError(f"the student has no {some_names(missing)}, which the teacher has")
    if unknown := sorted(given.keys() - required.keys()):
        raise ModelError(f"the teacher has no {some_names(unknown)}, which the student has")
    for name, shape in given.items():
        if shape != required[name]:
            raise ModelError(f"{name} is {list(shape)} in the student and {list(required[name])} in the teacher")


def blend(places: Mapping[str, Place], tensors: Iterator[tuple[str, Tensor]], keep: float) -> None:
    """Set this rank's rows to keep * frozen + (1 - keep) * given. No collectives except in `tensors`.

    Args:
        tensors: (name in the files, whole tensor), each once; in the same order on every rank.

    Raises:
        ModelError: a tensor has a different shape, occurs twice, is unknown or missing. The tensors before it have been
            blended, so the model cannot be used afterwards.
    """
    missing = {part.name: (place, part) for place in places.values() for part in place.parts}
    for name, whole in tensors:
        found = missing.pop(name, None)
        if found is None or tuple(whole.shape) != found[1].shape:
            raise ModelError(f"{name} {list(whole.shape)} does not match the frozen model, or occurred twice")
        blend_part(*found, whole, keep)
    if missing:
        raise ModelError(f"the frozen model did not receive {some_names(sorted(missing))}")
