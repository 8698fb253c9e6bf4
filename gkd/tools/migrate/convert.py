"""Convert old settings row by row: the settings here, and what became of each old key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gkd.config.key_list import all_keys
from gkd.config.load import load_config
from gkd.config.old_names.row import UNSET, NotConvertible, OldSettings, Row, Table
from gkd.errors import ConfigError

Status = Literal["mapped", "to set", "not supported", "not recognized", "default", "meaningless"]
STATUSES: dict[Status, str] = {
    "mapped": "mapped",
    "to set": "to set yourself",
    "not supported": "not supported",
    "not recognized": "not recognized",
    "default": "default here",
    "meaningless": "meaningless here",
}


@dataclass(slots=True)
class Entry:
    """Hold the result for one old key; `settings` are those of the YAML that it sets."""

    old: str
    value: Any
    status: Status
    note: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    is_set: bool = True  # False: the other system's default, which differs from the one here


def convert(table: Table, values: Mapping[str, Any]) -> list[Entry]:
    """Return an entry for each old key, and for each default of the other system that differs from the one here."""
    old = OldSettings(values, table)
    entries = [_entry(name, value, table.find(name), old) for name, value in values.items()]
    unset = [row for row in table.rows if row.default is not UNSET and not any(map(old.has, row.names))]
    defaults = [_entry(row.names[0], row.default, row, old, is_set=False) for row in unset]
    _refuse_conflicts([*entries, *defaults])
    return [*entries, *(entry for entry in defaults if entry.settings or entry.status == "to set")]


def settings_of(entries: list[Entry]) -> dict[str, Any]:
    """Return all settings of the entries, in the order of the schema."""
    found = {key: value for entry in entries for key, value in entry.settings.items()}
    return {key: found[key] for key in all_keys() if key in found}


def _entry(name: str, value: Any, row: Row | None, old: OldSettings, *, is_set: bool = True) -> Entry:
    if row is None:
        return Entry(name, value, "not recognized")
    if row.kind != "mapped":
        harmless = row.kind == "not supported" and (value is None or value in row.harmless)
        return Entry(name, value, "default") if harmless else Entry(name, value, row.kind, row.note)
    if value is None:
        return Entry(name, value, "default", "not set")
    if is_set and isinstance(value, str) and "$" in value:
        return Entry(name, value, "to set", f"set {_or(row)}: the variable has no value in the file.")
    try:
        result = row.convert(value, old)
    except NotConvertible as reason:
        return Entry(name, value, "to set", str(reason), is_set=is_set)
    except (TypeError, ValueError, ZeroDivisionError):
        return Entry(name, value, "to set", f"set {_or(row)}: the value cannot be converted. {row.note}".strip())
    settings = result if isinstance(result, dict) else {} if result is None else {row.keys[0]: result}
    entry = Entry(name, value, "mapped" if settings else "default", row.note, settings, is_set)
    return _checked(entry, row) if settings else entry


def _checked(entry: Entry, row: Row) -> Entry:
    """Return the entry without values that are defaults here; one with a value of the wrong type is to set."""
    try:
        load_config(None, [f"{key}={_flow(value)}" for key, value in entry.settings.items()])
    except ConfigError as error:
        return Entry(entry.old, entry.value, "to set", f"set {_or(row)}: {error.problem} {row.note}".strip())
    entry.settings = {key: value for key, value in entry.settings.items() if value != all_keys()[key].default}
    if not entry.settings:
        entry.status = "default"
    return entry


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
                entry.status = "to set"
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
    return repr(value) if isinstance(value, int | float) else f'"{value}"'
