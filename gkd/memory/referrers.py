"""List the live tensors on a device that Python objects refer to, with the names of these objects.

Used after an offload that left memory behind, and in the report of an out-of-memory error. It visits all objects of the
process a few times, which takes seconds in a process with large libraries. torch's memory history does not replace it:
it must be recorded from the start, exists on CUDA alone, and has where a tensor was allocated, not what keeps it alive.

Not found: tensors that only C++ refers to, such as those that autograd saves for the backward pass; sparse tensors; and
objects that `gc.freeze` has set aside, in a rank all objects of the imports (`gkd.cluster.garbage`).
"""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gkd.memory.usage import gib

# Levels of references above a tensor that are searched for a name. The local part of a sharded parameter needs six,
# including the dictionaries of attributes.
_LEVELS = 6
# Types that a name passes through on its way up; any other type ends it.
_CONTAINERS = (dict, list, tuple, set, frozenset, CellType, MethodType, torch.Tensor)
_UNKNOWN = "unknown to the garbage collector"
_KEY = " (a key)"


@dataclass(frozen=True, slots=True)
class Holder:
    """Tensors that are held in the same way."""

    name: str  # "Linear.weight", "AdamW.state[...]['exp_avg']", "logits in forward()"; "a list[...]" without owner
    dtype: str
    shape: tuple[int, ...]
    count: int  # storages
    n_bytes: int  # of the whole storages, however small the tensor

    def line(self) -> str:
        return f"{gib(self.n_bytes)} GiB: {self.name}, {self.count} x {self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor, and its path from an object that may have a name."""

    value: Any  # Tensor or UntypedStorage
    owner: Any  # itself, or the leaf whose gradient it is
    suffix: str = ""

    def name(self, names: Mapping[int, str]) -> str:
        return names.get(id(self.owner), _UNKNOWN) + self.suffix


def holders(device: torch.device) -> list[Holder]:
    """Return the tensors whose storages have memory on the device, largest group first; each storage counts once.

    Args:
        device: with its index, if it is a CUDA device.
    """
    objects = gc.get_objects()
    storages = _storages(objects, device)
    names = _names([tensor.owner for found in storages.values() for tensor in found], objects)
    groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for found in storages.values():
        best = min(found, key=lambda tensor: _preference(tensor.name(names)))
        storage = _storage(best.value)
        assert storage is not None
        is_tensor = isinstance(best.value, torch.Tensor)
        dtype = str(best.value.dtype).removeprefix("torch.") if is_tensor else "bytes"
        shape = tuple(best.value.shape) if is_tensor else (storage.nbytes(),)
        groups[best.name(names), dtype, shape].append(storage.nbytes())
    result = [Holder(*key, len(sizes), sum(sizes)) for key, sizes in groups.items()]
    return sorted(result, key=lambda holder: (-holder.n_bytes, holder.name))


def held_by(found: Sequence[Holder], limit: int = 12) -> list[str]:
    """Return human-readable lines: the largest groups, and the sum of the others."""
    rest = found[limit:]
    lines = [holder.line() for holder in found[:limit]]
    return [*lines, f"{gib(sum(h.n_bytes for h in rest))} GiB: {len(rest)} other kinds"] if rest else lines


def _storages(objects: Sequence[object], device: torch.device) -> dict[int, list[_Tensor]]:
    """Return the tensors of each storage, by its address."""
    found: dict[int, list[_Tensor]] = defaultdict(list)

    def add(tensor: _Tensor) -> None:
        storage = _storage(tensor.value)
        if storage is not None and storage.device == device and storage.nbytes() and storage.data_ptr():
            found[storage.data_ptr()].append(tensor)

    for item in objects:
        # By type(): isinstance reads a proxy's __class__, and so runs code of the object behind it.
        if not issubclass(type(item), torch.Tensor | torch.UntypedStorage):
            continue
        add(_Tensor(item, item))
        if isinstance(item, torch.Tensor) and item.is_leaf and item.grad is not None:  # only C++ may refer to it
            for part in _parts(item.grad):
                add(_Tensor(part, item, ".grad"))
    return found


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor itself, or the tensors within a DTensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # a DTensor's mesh is among them
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _storage(item: Any) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None if it has none of its own."""
    if isinstance(item, torch.UntypedStorage):
        return item
    if item.layout is not torch.strided or is_traceable_wrapper_subclass(item):
        return None  # the tensor within a DTensor is found by itself
    try:
        return item.untyped_storage()
    except (NotImplementedError, RuntimeError):  # torch raises this for tensors without storage, like those of vmap
        return None


def _names(targets: Sequence[object], objects: Sequence[object]) -> dict[int, str]:
    """Return the best name of each target by its id; targets without a Python referrer are left out."""
    names: dict[int, str] = {}
    partial: dict[int, str] = {}  # of targets in containers without a known owner
    # id of an object -> the targets below it, and how each is reached from it
    below: dict[int, dict[int, str]] = {id(target): {id(target): ""} for target in targets}
    objects, n_targets = list(objects), len(below)
    for _ in range(_LEVELS):
        above: dict[int, dict[int, str]] = defaultdict(dict)
        here: dict[int, str] = {}
        opened: list[object] = []
        for item in objects:
            if below.keys().isdisjoint(map(id, gc.get_referents(item))):  # nearly all of them
                continue
            for step, child in _references(item, below, opened):
                for target, path in below[child].items():
                    if target == id(item):
                        continue
                    if issubclass(type(item), _CONTAINERS):
                        _keep_best(above[id(item)], target, step + path)
                        partial[target] = f"a {type(item).__name__}{step}{path}"
                    elif _KEY in path:  # a dictionary that has it as a value gives a better name
                        partial[target] = _root_name(item, step, path)
                    else:
                        _keep_best(here, target, _root_name(item, step, path))
        objects += opened
        names |= here
        if len(names) == n_targets:
            break
        below = {owner: {t: path for t, path in paths.items() if t not in names} for owner, paths in above.items()}
        below = {owner: paths for owner, paths in below.items() if paths}
    return partial | names


def _keep_best(paths: dict[int, str], target: int, path: str) -> None:
    paths[target] = min(paths.get(target, path), path, key=_preference)


def _preference(name: str) -> tuple[bool, bool, int, int, str]:
    """Return a sort key, best first: known, an owner with a name, not a local or closure, few unnamed steps, short."""
    return (name.startswith(_UNKNOWN), name.startswith("a ") or " in " in name, name.count("[...]"), len(name), name)


def _references(item: object, wanted: Mapping[int, Any], opened: list[object]) -> Iterator[tuple[str, int]]:
    """Yield (path, id) of each wanted object that `item` refers to.

    Args:
        opened: receives the dictionaries of attributes that this search created.
    """
    if issubclass(type(item), dict):
        for key, value in list(dict.items(cast("dict[Any, Any]", item))):
            if id(value) in wanted:
                yield f"[{key!r}]" if isinstance(key, str) else "[...]", id(value)
            if id(key) in wanted:
                yield _KEY, id(key)
        return
    children = {id(child) for child in gc.get_referents(item)} & wanted.keys()  # first: the next line may change it
    attributes = _attributes(item, opened)
    for child in children:
        yield attributes.get(child, ".grad" if issubclass(type(item), torch.Tensor) else "[...]"), child


def _attributes(item: object, opened: list[object]) -> dict[int, str]:
    """Return the path of each referent of `item`, by its id. Runs no code of the item's class."""
    kind = type(item)
    if isinstance(item, FrameType):
        return {id(value): name for name, value in item.f_locals.items()}
    if issubclass(kind, list | tuple | set | frozenset):
        return {}
    if isinstance(item, CellType | MethodType | FunctionType):
        return {id(child): "" for child in gc.get_referents(item)}
    if issubclass(kind, type):  # a class: what it shows as its __dict__ is a view of the one it has
        return {id(child): "" for child in gc.get_referents(item) if type(child) is dict}
    found: dict[int, str] = {}
    for cls in kind.__mro__:
        for name, slot in vars(cls).items():
            if isinstance(slot, MemberDescriptorType):
                try:
                    found[id(slot.__get__(item, kind))] = f".{name}"
                except AttributeError:  # an empty slot
                    continue
    try:
        attributes = object.__getattribute__(item, "__dict__")
    except AttributeError:  # it has none
        return found
    if not issubclass(type(attributes), dict):  # whatever its class gives out by that name
        return found
    found |= {id(value): f".{name}" for name, value in dict.items(attributes)}
    opened.append(attributes)
    return found | {id(attributes): ""}


def _root_name(item: object, step: str, path: str) -> str:
    if isinstance(item, FrameType):
        return f"{step}{path} in {item.f_code.co_qualname}()"
    if isinstance(item, FunctionType):
        return f"a variable in {item.__qualname__}()'s closure"
    owner = item.__name__ if isinstance(item, ModuleType | type) else type(item).__name__
    attribute = re.sub(r"^\['(\w+)'\]", r".\1", step + path)  # out of the dictionary of its attributes
    return owner + re.sub(r"^\._(?:parameters|buffers)\['(\w+)'\]", r".\1", attribute)
