"""List the keys of the config with type, default and description, and read their values from a config."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from gkd.config.declare import Key
from gkd.config.schema_sections import Sections
from teacher_server.config.declare import declared

C = TypeVar("C")


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
    return {each.name: each for each in _walk(Sections, "")}


def sections() -> set[str]:
    """Return the dotted names of all sections, e.g. `actor` and `actor.optim`."""
    return {name.rpartition(".")[0] for name in all_keys()}


def value_of(config: Sections, name: str) -> Any:
    """Return the value of a dotted key."""
    return functools.reduce(getattr, name.split("."), config)


def with_values(config: C, values: Mapping[str, object]) -> C:
    """Return a copy of the settings with other values of dotted keys; nothing is checked."""
    for name, value in values.items():
        section, _, rest = name.partition(".")
        inner = with_values(getattr(config, section), {rest: value}) if rest else value
        config = dataclasses.replace(cast(Any, config), **{section: inner})
    return config


def _walk(cls: type, prefix: str) -> Iterator[DeclaredKey]:
    for item in dataclasses.fields(cls):
        setting = declared(item)
        default = item.default_factory() if callable(item.default_factory) else item.default
        if setting is None:
            yield from _walk(type(default), f"{prefix}{item.name}.")
        else:
            assert isinstance(setting, Key)
            yield DeclaredKey(f"{prefix}{item.name}", str(item.type), default, setting)
