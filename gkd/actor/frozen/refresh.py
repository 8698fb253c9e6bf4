"""A trained model's tensors -> the shards of a frozen one, one tensor at a time: a teacher that follows its student."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gkd.actor.fsdp.weights import Place, blend_part
from gkd.errors import ModelError
from gkd.hf.folder import TensorPlan
from gkd.hf.index import some_names


def check_plan(places: Mapping[str, Place], plan: Sequence[TensorPlan]) -> None:
    """Could `blend` take these tensors? Raises ModelError: names those that one of the models has and the other not."""
    wanted = {part.name: part.shape for place in places.values() for part in place.parts}
    given = {name: tuple(shape) for name, shape, _ in plan}
    if missing := sorted(wanted.keys() - given.keys()):
        raise ModelError(f"the student has no {some_names(missing)}, which the teacher has")
    if unknown := sorted(given.keys() - wanted.keys()):
        raise ModelError(f"the teacher has no {some_names(unknown)}, which the student has")
    for name, shape in given.items():
        if shape != wanted[name]:
            raise ModelError(f"{name} is {list(shape)} in the student and {list(wanted[name])} in the teacher")


def blend(places: Mapping[str, Place], tensors: Iterator[tuple[str, Tensor]], keep: float) -> None:
    """keep * frozen + (1 - keep) * given, each tensor into this rank's rows; no collective but those of `tensors`.

    Args:
        tensors: whole tensors by their names in the files, every one once; on every rank in the same order.

    Raises:
        ModelError: a tensor has another shape than here, comes twice, or is not known here; or one did not come. What
            came before it has been taken: the model is then neither the one nor the other, and must not be used.
    """
    due = {part.name: (place, part) for place in places.values() for part in place.parts}
    for name, whole in tensors:
        found = due.pop(name, None)
        if found is None or tuple(whole.shape) != found[1].shape:
            raise ModelError(f"{name} {list(whole.shape)} has no place in the frozen model, or had it already")
        blend_part(*found, whole, keep)
    if due:
        raise ModelError(f"the frozen model did not get {some_names(sorted(due))}")
