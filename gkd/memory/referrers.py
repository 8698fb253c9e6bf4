"""Who keeps memory on a device: the live tensors that Python knows, and what refers to them.

For a look after an offload that left something behind, and for the report when memory has run out. It walks all
objects of the process a few times, which takes seconds where large libraries are loaded.

Not seen: what only C++ refers to, as the tensors that autograd keeps for the backward pass; sparse tensors; and what
`gc.freeze` has set aside, which in a rank is all that was there when its libraries were imported
(`gkd.cluster.imports`).
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

# How far up from a tensor a name is looked for. The local part of a sharded parameter's is six up, with the
# dictionaries that objects keep their attributes in.
_LEVELS = 6
# What a name goes through on its way up; anything else ends it.
_CONTAINERS = (dict, list, tuple, set, frozenset, CellType, MethodType, torch.Tensor)
_NOBODY = "nobody the garbage collector knows"
_KEY = " (a key)"


@dataclass(frozen=True, slots=True)
class Holder:
    """Tensors that are held in the same way."""

    name: str  # "Linear.weight", "AdamW.state[...]['exp_avg']", "logits in forward()"; "a list[...]" that nobody has
    dtype: str
    shape: tuple[int, ...]
    count: int  # storages
    n_bytes: int  # of those storages, each whole, however small the tensor

    def line(self) -> str:
        return f"{gib(self.n_bytes)} GiB: {self.name}, {self.count} x {self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor, and how it is reached from an object that a name can be found for."""

    value: Any  # Tensor or UntypedStorage
    owner: Any  # itself, or the leaf whose gradient it is
    suffix: str = ""

    def name(self, names: Mapping[int, str]) -> str:
        return names.get(id(self.owner), _NOBODY) + self.suffix


def holders(device: torch.device) -> list[Holder]:
    """The tensors whose storages have memory on the device, largest group first; each storage is counted once.

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
    """Lines for people: the largest, and how much the others hold together."""
    rest = found[limit:]
    lines = [holder.line() for holder in found[:limit]]
    return [*lines, f"{gib(sum(h.n_bytes for h in rest))} GiB: {len(rest)} other kinds"] if rest else lines


def _storages(objects: Sequence[object], device: torch.device) -> dict[int, list[_Tensor]]:
    """By address, the tensors on each."""
    found: dict[int, list[_Tensor]] = defaultdict(list)

    def add(tensor: _Tensor) -> None:
        storage = _storage(tensor.value)
        if storage is not None and storage.device == device and storage.nbytes() and storage.data_ptr():
            found[storage.data_ptr()].append(tensor)

    for item in objects:
        # By its type: isinstance would ask a proxy for its class, and so run what it stands for.
        if not issubclass(type(item), torch.Tensor | torch.UntypedStorage):
            continue
        add(_Tensor(item, item))
        if isinstance(item, torch.Tensor) and item.is_leaf and item.grad is not None:  # only C++ may refer to it
            for part in _parts(item.grad):
                add(_Tensor(part, item, ".grad"))
    return found


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Itself, or the tensors within a DTensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # a DTensor's mesh is among them
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _storage(item: Any) -> torch.UntypedStorage | None:
    """None: it has none of its own."""
    if isinstance(item, torch.UntypedStorage):
        return item
    if item.layout is not torch.strided or is_traceable_wrapper_subclass(item):
        return None  # the tensor within a DTensor is found by itself
    try:
        return item.untyped_storage()
    except (NotImplementedError, RuntimeError):  # how torch says that a tensor, as vmap's, has none
        return None


def _names(targets: Sequence[object], objects: Sequence[object]) -> dict[int, str]:
    """id of a target -> its best name; those that nothing in Python refers to are left out."""
    names: dict[int, str] = {}
    partial: dict[int, str] = {}  # of those in containers that nobody is known to have
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
                    elif _KEY in path:  # whoever has it as a value tells more
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
    """Least first: somebody, who has a name, no local variable or closure, few unnamed places, short."""
    return (name.startswith(_NOBODY), name.startswith("a ") or " in " in name, name.count("[...]"), len(name), name)


def _references(item: object, wanted: Mapping[int, Any], opened: list[object]) -> Iterator[tuple[str, int]]:
    """(how, id) of each wanted object that `item` refers to.

    Args:
        opened: gets the dictionaries of attributes that are there only because this looked for them.
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
    """id of what `item` refers to -> how; no code of its class is run."""
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
