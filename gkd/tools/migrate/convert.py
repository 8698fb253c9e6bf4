"""Convert old settings row by row: the settings here, and what became of each old key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gkd.config.dialects.table import UNSET, Dialect, NotConvertible, OldSettings, Row
from gkd.config.load import load_config
from gkd.config.schema_sections import all_keys
from gkd.errors import ConfigError

Status = Literal["mapped", "to set", "refused", "not supported", "not recognized", "default", "meaningless"]
STATUSES: dict[Status, str] = {
    "mapped": "mapped",
    "to set": "to set yourself",
    "refused": "refused",
    "not supported": "not supported",
    "not recognized": "not recognized",
    "default": "default here",
    "meaningless": "meaningless here",
}


@dataclass(slots=True)
class Entry:
    """Hold the result for one old key.

    Args:
        settings: settings of the YAML that it sets.
        keys: keys that it could set.
        servers: commands that start the teachers.
        is_set: false: the other system's default, which differs from the one here.
    """

    old: str
    value: Any
    status: Status
    note: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    is_set: bool = True
    keys: list[str] = field(default_factory=list)
    servers: list[str] = field(default_factory=list)


def convert(dialect: Dialect, values: Mapping[str, Any]) -> list[Entry]:
    """Return an entry for each old key, and for each default of the other system that differs from the one here."""
    old = OldSettings(values, dialect)
    entries = [_entry(name, value, dialect.find(name), old) for name, value in values.items()]
    unset = [row for row in dialect.rows if row.default is not UNSET and not any(map(old.has, row.names))]
    defaults = [_entry(row.names[0], row.default, row, old, is_set=False) for row in unset]
    _refuse_conflicts([*entries, *defaults])
    for entry in [*entries, *defaults]:
        _drop_defaults(entry)
    return [*entries, *(entry for entry in defaults if entry.settings or entry.status == "to set")]


def settings_of(entries: list[Entry]) -> dict[str, Any]:
    """Return all settings of the entries, in the order of the schema."""
    found = {key: value for entry in entries for key, value in entry.settings.items()}
    return {key: found[key] for key in all_keys() if key in found}


def _entry(name: str, value: Any, row: Row | None, old: OldSettings, *, is_set: bool = True) -> Entry:
    if row is None:
        return Entry(name, value, "not recognized")
    if row.kind != "mapped":
        harmless = row.kind in ("refused", "unsupported") and (value is None or value in row.harmless)
        status: Status = "default" if harmless else "not supported" if row.kind == "unsupported" else row.kind
        return Entry(name, value, status, "" if harmless else row.note)
    if value is None:
        return Entry(name, value, "default", "not set")
    to_set = Entry(name, value, "to set", is_set=is_set, keys=row.keys)
    if is_set and "$" in str(value):
        to_set.note = f"set {_or(row)}: the variable has no value in the file."
        return to_set
    try:
        settings = row.settings(value, old)
        entry = Entry(name, value, "mapped", row.note, settings, is_set, row.keys, row.commands(value, old))
        problem = _wrong_type(settings)
    except NotConvertible as reason:
        to_set.note = str(reason)
        return to_set
    except (TypeError, ValueError, ZeroDivisionError, LookupError, AttributeError):
        problem = "the value cannot be converted."
    if problem:
        to_set.note = f"set {_or(row)}: {problem} {row.note}".strip()
        return to_set
    return entry


def _drop_defaults(entry: Entry) -> None:
    """Leave out what is the default here."""
    entry.settings = {key: each for key, each in entry.settings.items() if each != all_keys()[key].default}
    if entry.status == "mapped" and not entry.settings and not entry.servers:
        entry.status = "default"


def _wrong_type(settings: Mapping[str, Any]) -> str:
    """Return what is wrong with the value of a key; empty means that it is valid."""
    try:
        load_config(None, [f"{key}={_flow(value)}" for key, value in settings.items()])
    except ConfigError as error:
        return error.problem
    return ""


def _refuse_conflicts(entries: list[Entry]) -> None:
    """Keep the first of two values of one key; the other one is to set. Defaults come last."""
    taken: dict[str, Entry] = {}
    for entry in entries:
        for key, value in list(entry.settings.items()):
            first = taken.setdefault(key, entry)
            if first.settings[key] == value:
                continue
            del entry.settings[key]
            if entry.is_set:
                entry.keys, entry.status = [key], "to set"
                entry.note = f"{key} is {value!r} by this, and {first.settings[key]!r} by {first.old}, which was kept."


def _or(row: Row) -> str:
    return " or ".join(row.keys)


def _flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(each)}" for name, each in value.items()) + "}"
    return repr(value) if isinstance(value, int | float) else json.dumps(str(value), ensure_ascii=False)
