"""List the keys of the config with type, default and description, and read their values from a config."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gkd.config.declare import Key
from gkd.config.schema import Config
from teacher_server.config.declare import declared


@dataclass(frozen=True, slots=True)
class DeclaredKey:
    """A key by its dotted name, with what the schema declares of it."""

    name: str
    type: str  # annotation, e.g. "list[str]"
    default: Any
    key: Key


@functools.cache
def all_keys() -> Mapping[str, DeclaredKey]:
    """Return every key by its dotted name, in the schema's order."""
    return {each.name: each for each in _walk(Config, "")}


def sections() -> set[str]:
    """Return the dotted names of all sections, e.g. `actor` and `actor.optim`."""
    return {name.rpartition(".")[0] for name in all_keys()}


def value_of(config: Config, name: str) -> Any:
    """Return the value of a dotted key."""
    return functools.reduce(getattr, name.split("."), config)


def _walk(cls: type, prefix: str) -> Iterator[DeclaredKey]:
    for item in dataclasses.fields(cls):
        setting = declared(item)
        default = item.default_factory() if callable(item.default_factory) else item.default
        if setting is None:
            yield from _walk(type(default), f"{prefix}{item.name}.")
        else:
            assert isinstance(setting, Key)
            yield DeclaredKey(f"{prefix}{item.name}", str(item.type), default, setting)
