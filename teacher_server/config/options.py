"""Derive a flag and a YAML key, with their checks and help, from each declared setting.

The flag `--max-queue-mib` is `max_queue_mib` in the file. Both are converted and checked by the same code.
`settings.py` checks settings against each other.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from teacher_server.config.declare import Setting, declare, declared
from teacher_server.errors import SettingsError

Kind = Literal["int", "float", "text", "choice", "flag", "list"]
_KINDS: dict[str, Kind] = {"int": "int", "float": "float", "bool": "flag", "tuple[str, ...]": "list"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetting(Setting):
    """Describe one setting of the server; `help` is its line of --help."""

    metavar: str = "N"
    in_file_only: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """A declared setting with its name, type and default."""

    key: str
    kind: Kind
    default: Any
    setting: ServerSetting

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    def convert(self, raw: Any, where: str) -> Any:
        """Return the value of a flag's text or of a YAML value. Raises SettingsError naming `where`."""
        if self.kind in ("int", "float"):
            return self._number(raw, where)
        if self.kind == "flag":
            if isinstance(raw, bool):
                return raw
            raise SettingsError(f"{where}: {raw!r} is not true or false.")
        if self.kind == "list":
            return _list(raw, where)
        if self.kind == "choice" and not self.setting.is_valid(raw):
            raise SettingsError(f"{where}: {raw!r} is not one of {self.setting.allowed()}.")
        if not isinstance(raw, str) or not raw:
            raise SettingsError(f"{where}: {raw!r} is not a text. Fix: put it in quotes.")
        return raw

    def _number(self, raw: Any, where: str) -> int | float:
        number = int if self.kind == "int" else float
        try:
            # YAML has typed its numbers already; `true` and 1.5 are not integers.
            if not isinstance(raw, str) and (isinstance(raw, bool) or number(raw) != raw):
                raise ValueError
            value = number(raw)
            if not self.setting.is_valid(value):
                raise ValueError
        except (TypeError, ValueError, OverflowError) as error:
            kind = "an integer" if self.kind == "int" else "a number"
            raise SettingsError(f"{where}: {raw!r} is not {kind} in the range {self.setting.allowed()}.") from error
        return value


def option(default: Any, help: str, **details: Any) -> Any:
    """Return a dataclass field; `details` are the arguments of `ServerSetting`."""
    return declare(default, ServerSetting(help=help, **details))


def options_of(cls: type) -> tuple[Option, ...]:
    """Return the declared settings of a dataclass, in their order."""
    found = []
    for item in dataclasses.fields(cls):
        if isinstance(setting := declared(item), ServerSetting):
            kind = "choice" if setting.choices else _KINDS.get(str(item.type).removesuffix(" | None"), "text")
            found.append(Option(item.name, kind, item.default, setting))
    return tuple(found)


def add_flags(parser: argparse.ArgumentParser, options: Iterable[Option], title: str) -> None:
    """Add a flag for each option. Flags that are not on the command line are not in the namespace."""
    group = parser.add_argument_group(title)
    for each in options:
        setting = each.setting
        if setting.in_file_only:
            continue
        if each.kind == "flag":
            action = argparse.BooleanOptionalAction
            group.add_argument(each.flag, action=action, default=argparse.SUPPRESS, help=setting.help)
            continue
        choices = [*setting.choices, *["MODULE:FUNCTION"] * setting.paths]
        metavar = "{" + ",".join(choices) + "}" if choices else setting.metavar
        text = setting.help if each.default is None else f"{setting.help} (default: {each.default})"
        # Values stay text here and are converted later, so that a flag and a YAML key give the same error.
        group.add_argument(each.flag, dest=each.key, metavar=metavar, default=argparse.SUPPRESS, help=text)


def given_flags(args: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """Return {key: value} of the flags on the command line. Raises SettingsError."""
    given = vars(args)
    return {each.key: each.convert(given[each.key], each.flag) for each in options if each.key in given}


def file_values(
    content: dict[Any, Any], options: Iterable[Option], where: str, others: Iterable[str]
) -> dict[str, Any]:
    """Return {key: value} of a YAML mapping; `others` are keys that the caller reads itself.

    Raises:
        SettingsError: an unknown key, or an invalid value.
    """
    by_key = {each.key: each for each in options}
    values = {}
    for key, raw in content.items():
        if key in others:
            continue
        if key not in by_key:
            known = ", ".join(sorted([*by_key, *others]))
            raise SettingsError(f"{where}: unknown key {key!r}. Known: {known}.")
        if raw is not None:  # `key:` with nothing after it: the default
            values[key] = by_key[key].convert(raw, f"{where}: {key}")
    return values


def _list(raw: Any, where: str) -> tuple[str, ...]:
    items = raw.split(",") if isinstance(raw, str) else [raw] if isinstance(raw, int) else raw
    if isinstance(raw, bool) or not isinstance(items, list) or not all(type(item) in (str, int) for item in items):
        raise SettingsError(f"{where}: {raw!r} is not a list like 4,5,6,7.")
    names = tuple(str(item).strip() for item in items)
    if not names or not all(names):
        raise SettingsError(f"{where}: {raw!r} has an empty entry.")
    return names
