"""Describe one setting of another system: `Row`, the functions that make rows, and the table of a system."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

Kind = Literal["mapped", "default", "meaningless", "not supported"]
UNSET: Any = object()  # a row without a default


class NotConvertible(Exception):
    """A value has no counterpart that can be computed; the message is what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting of another system.

    Args:
        old: the name, dotted or as a flag; several names of the same setting are separated by spaces. `*` stands for
            any text.
        kind: mapped; default (what this system does without a key); meaningless; not supported.
        new: the keys here, separated by spaces; empty unless mapped.
        note: the remark of reports, hints and pages.
        convert: (value, all old settings) -> value of the only new key, or {key: value}; None: nothing to set. Raises
            NotConvertible.
        default: what the other system uses if the name is not set, where that differs from the default here.
        harmless: values of a setting that is not supported which have no effect.
    """

    old: str
    kind: Kind
    new: str = ""
    note: str = ""
    convert: Convert = lambda value, old: value
    default: Any = UNSET
    harmless: tuple[Any, ...] = ()

    @property
    def names(self) -> list[str]:
        return self.old.split()

    @property
    def keys(self) -> list[str]:
        return self.new.split()


class OldSettings:
    """The settings of an old file, with the other system's defaults, for conversions that need several of them."""

    def __init__(self, values: Mapping[str, Any], table: Table) -> None:
        self._values, self._table = {plain(name): value for name, value in values.items()}, table

    def __call__(self, name: str, otherwise: Any = None) -> Any:
        """Return the value of a setting by one of its names, else the other system's default, else `otherwise`."""
        row = self._table.find(name)
        for each in (name, *(row.names if row and row.kind == "mapped" else ())):
            if self._values.get(plain(each)) is not None:
                return self._values[plain(each)]
        return otherwise if row is None or row.default is UNSET else row.default

    def has(self, pattern: str) -> bool:
        """Return whether a setting with such a name is set; `*` stands for any text."""
        return any(fnmatchcase(name, plain(pattern)) for name, value in self._values.items() if value is not None)


Convert = Callable[[Any, OldSettings], Any]


@dataclass(frozen=True)
class Table:
    """All settings of one system that are listed here."""

    name: str  # on the command line
    title: str  # in texts
    rows: tuple[Row, ...]

    def find(self, name: str) -> Row | None:
        """Return the row of a name as it is written in that system's files; exact names come before patterns."""
        if row := self._exact.get(plain(name)):
            return row
        return next((row for row, pattern in self._patterns() if fnmatchcase(plain(name), pattern)), None)

    @functools.cached_property
    def _exact(self) -> dict[str, Row]:
        return {plain(name): row for row in self.rows for name in row.names if "*" not in name}

    @functools.cached_property
    def words(self) -> list[tuple[Row, list[str]]]:
        """Return each name as its words, without the `*.` that stands for any role, with its row."""
        return [(row, plain(name).removeprefix("*.").split(".")) for row in self.rows for name in row.names]

    def _patterns(self) -> Iterator[tuple[Row, str]]:
        yield from ((row, plain(name)) for row in self.rows for name in row.names if "*" in name)


def plain(name: str) -> str:
    """Return a name without the signs of flags and of Hydra's overrides: `--save-interval` -> `save_interval`."""
    return name.lstrip("-+~").replace("-", "_")


def mapped(old: str, new: str, note: str = "", convert: Convert | None = None, default: Any = UNSET) -> Row:
    """Return a row with keys here; without a conversion the value is kept."""
    row = Row(old=old, kind="mapped", new=new, note=note, default=default)
    return row if convert is None else Row(old=old, kind="mapped", new=new, note=note, convert=convert, default=default)


def same(old: str, note: str) -> Row:
    """Return a row of what this system does without a key."""
    return Row(old=old, kind="default", note=note)


def meaningless(old: str, note: str) -> Row:
    """Return a row of a setting that has no counterpart because there is nothing to set."""
    return Row(old=old, kind="meaningless", note=note)


def unsupported(old: str, note: str, harmless: tuple[Any, ...] = ()) -> Row:
    """Return a row of something that this system does not do; `harmless` values do not ask for it."""
    return Row(old=old, kind="not supported", note=note, harmless=harmless)
