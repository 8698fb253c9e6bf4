"""Derive a flag and a YAML key, with their checks and help, from each declared setting of the server.

The flag `--max-queue-mib` is `max_queue_mib` in the file. Both are read and checked as the trainer's settings are, by
`teacher_server.config.load`. `settings.py` checks settings against each other.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from teacher_server.config.declare import Declared, Setting, declare, keys_of
from teacher_server.config.load import Problem, Tree, Unreadable, limit_problem, merge, nearest, read_word
from teacher_server.errors import SettingsError

T = TypeVar("T")
_GPU = re.compile(r"0|[1-9]\d*|[A-Za-z][\w/:-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetting(Setting):
    """Describe one setting of the server."""

    metavar: str = "N"
    in_file_only: bool = False


Option: TypeAlias = Declared[ServerSetting]


def option(default: Any, **details: Any) -> Any:
    """Return a dataclass field; `details` are the arguments of `ServerSetting`."""
    return declare(default, ServerSetting(**details))


def options_of(cls: type) -> tuple[Option, ...]:
    """Return the declared settings of a dataclass, in their order."""
    return tuple(keys_of(cls, ServerSetting).values())


def gpu_list(value: Any) -> Any:
    """Return the GPUs of a text like 4,5,6,7, and a list as it is. Raises ValueError: an entry names no GPU."""
    gpus = [gpu.strip() for gpu in str(value).split(",")] if isinstance(value, str | int) else value
    if isinstance(gpus, list) and not (gpus and all(_GPU.fullmatch(str(gpu)) for gpu in gpus)):
        raise ValueError(value)
    return gpus


def add_flags(parser: argparse.ArgumentParser, options: Iterable[Option], title: str) -> None:
    """Add a flag for each option. Flags that are not on the command line are not in the namespace."""
    group = parser.add_argument_group(title)
    for each in options:
        setting = each.setting
        if setting.in_file_only:
            continue
        if each.type == "bool":
            action = argparse.BooleanOptionalAction
            group.add_argument(flag_of(each.name), action=action, default=argparse.SUPPRESS, help=each.help)
            continue
        choices = [*setting.choices, *["MODULE:FUNCTION"] * setting.paths]
        metavar = "{" + ",".join(choices) + "}" if choices else setting.metavar
        text = each.help if each.default is None else f"{each.help} (default: {each.default})"
        # Values stay text here and are converted later, so that a flag and a YAML key give the same error.
        group.add_argument(flag_of(each.name), dest=each.name, metavar=metavar, default=argparse.SUPPRESS, help=text)


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def given_flags(args: argparse.Namespace, cls: type) -> Tree:
    """Return {key: value} of the flags on the command line. Raises SettingsError."""
    tree: Tree = {}
    for each in options_of(cls):
        value = vars(args).get(each.name)
        if isinstance(value, str) and each.type.startswith(("int", "float")):
            try:
                tree |= read_word(f"{each.name}={value}", cls)
            except Unreadable as error:
                raise settings_error(flag_of(each.name), error.problem) from error
        elif value is not None:
            tree[each.name] = value
    return tree


def settings_from(cls: type[T], trees: Iterable[Tree], where: Callable[[str], str]) -> T:
    """Return the settings of trees, of which later ones win.

    Args:
        where: returns the place of a key in an error.

    Raises:
        SettingsError: an unknown key, or an invalid value.
    """
    keys = keys_of(cls, ServerSetting)

    def unknown(values: Mapping[str, Any]) -> list[Problem]:
        return [Problem(key, values[key], "there is no such key.", nearest(key, keys)) for key in values]

    settings, problems = merge(cls, keys, trees, unknown)
    if settings is not None:
        problems += [found for each in keys.values() if (found := limit_problem(each, getattr(settings, each.name)))]
    for problem in problems:
        raise settings_error(where(problem.key), problem)
    assert settings is not None
    return settings


def settings_error(where: str, problem: Problem) -> SettingsError:
    return SettingsError(f"{where}: {problem.value!r}: {problem.problem} Fix: {problem.fix}")
