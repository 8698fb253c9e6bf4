"""Read the settings from a YAML file and `key=value` overrides into a `gkd.config.schema.Config`, and write them.

    config = load_config("configs/quickstart_cpu.yaml", ["actor.optim.lr=1e-3"])

Imports neither torch nor ray nor an engine, so that a wrong setting is refused in less than a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gkd.config.check_values import value_errors
from gkd.config.foreign_keys import old_answer, suggestion
from gkd.config.schema import Config
from gkd.config.schema_sections import all_keys, sections
from gkd.errors import ConfigError
from teacher_server.config.load import Problem, Tree, Unreadable, leaves, merge, read_file, read_word


def load_config(path: str | Path | Sequence[str | Path] | None, overrides: Sequence[str] = ()) -> Config:
    """Return the defaults, updated by YAML files, of which later ones win, and then by `key=value` overrides.

    Raises:
        ConfigError: a file is not readable; or it names every unknown key (with what to write instead), every wrong
            type and malformed override, and then also every value outside its limits.
    """
    config, errors = read_config(path, overrides)
    if errors or config is None:
        wrong = {error.key for error in errors}
        limits = [] if config is None else [error for error in value_errors(config) if error.key not in wrong]
        raise ConfigError.together([*errors, *limits])
    return config


def read_config(
    path: str | Path | Sequence[str | Path] | None, overrides: Sequence[str] = ()
) -> tuple[Config | None, list[ConfigError]]:
    """Return the settings as `load_config` does, without what is wrong, and its errors without those of limits.

    The settings are None if a file is not readable, or an interpolation cannot be resolved: then most are unknown.
    """
    paths = [path] if isinstance(path, str | Path) else path or ()
    try:
        trees = [_read_file(file) for file in paths]
    except ConfigError as error:
        return None, [error]
    errors: list[ConfigError] = []
    for override in overrides:
        try:
            trees.append(read_word(override, Config))
        except Unreadable as error:
            errors.append(ConfigError(*error.problem))
    config, problems = merge(Config, all_keys(), trees, _unknown)
    errors += [ConfigError(*problem) for problem in problems]
    if config is None:
        return None, errors
    values = {name: config.value(name) for name, key in all_keys().items() if key.setting.is_file}
    expanded = {name: _expanded(name, value, errors) for name, value in values.items()}
    for name, route in config.teacher.routes.items():
        route.keys = _expanded(f"teacher.routes.{name}.keys", route.keys, errors)
    return config.with_values(expanded), errors


def _read_file(path: str | Path) -> Tree:
    try:
        return read_file(path, Config)
    except Unreadable as error:
        raise ConfigError(*error.problem) from error


def _unknown(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each key that does not exist; those that no known name is like share the last one."""
    problems: list[Problem] = []
    foreign: Tree = {}
    for key, value in values.items():
        if key in sections():
            fix = old_answer(key) or f"set its keys, as {key}.KEY=VALUE."
            problems.append(Problem(key, value, "is a section, not a key.", fix))
        elif hint := suggestion(key):
            problems.append(Problem(key, value, "this key does not exist.", hint))
        else:
            foreign[key] = value
    if foreign:
        fix = "remove it, or see the keys in gkd train --help and the names of other systems in docs/coming_from.md."
        (name, value), *more = foreign.items()
        if more:
            name = f"{len(foreign)} other keys"
            value = list(foreign)
        problems.append(Problem(name, value, "this key does not exist.", fix))
    return problems


def _expanded(key: str, value: Any, errors: list[ConfigError]) -> Any:
    """Return paths with the user's home in place of ~, and variables; add an error for one that is not set."""
    if value is None:
        return None
    if isinstance(value, list):
        return [_expanded(key, entry, errors) for entry in value]
    path = os.path.expandvars(os.path.expanduser(value))
    if unset := re.search(r"\$[A-Za-z_]\w*", path):
        fix = "set it, or write the path."
        errors.append(ConfigError(key, value, f"{unset[0]} is no variable of the environment.", fix))
    return path


def add_config(parser: Any, about: str, *, required: bool = True) -> None:
    """Add `--config`, which may be repeated, to a parser or a group of its arguments."""
    about = f"{about}; may be repeated, later files win; X.yaml alone is the same"
    parser.add_argument("--config", action="append", required=required, metavar="X.yaml", help=about)


def parse_overrides(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line with `key=value` overrides; exits with a hint if an override is written like a flag.

    A YAML file without a flag is one of `--config`.
    """
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that differ from the file's")
    words = list[str]()
    for word in sys.argv[1:] if argv is None else argv:
        is_file = word.endswith((".yaml", ".yml")) and not word.startswith("-") and "=" not in word
        words += ["--config", word] if is_file and words[-1:] != ["--config"] else [word]
    args, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        flags = [word for word in unknown if word.startswith("--")]  # the others may be their values
        parser.error("\n".join(f"{word}: {_flag_hint(word)}" for word in flags or unknown))
    return args


def _flag_hint(word: str) -> str:
    key, _, value = word.lstrip("-").partition("=")
    if key.partition(".")[0] in sections():
        return f"write settings without the dashes, as {key}={value or 'VALUE'}"
    return old_answer(word.partition("=")[0]) or "there is no such argument."


def yaml_values(path: str | Path) -> dict[str, Any]:
    """Return the values of a YAML file by dotted key as they are written, also keys that this version does not have.

    Raises:
        ConfigError: the file is not readable.
    """
    return dict(leaves(_read_file(path), all_keys()))


def config_yaml(config: Config) -> str:
    """Return the resolved settings as YAML; `load_config` of a file with it gives the same config."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(dataclasses.asdict(config))))


def _escaped(value: Any) -> Any:
    r"""Return a value with \${ for each ${ of its texts, which would stand for the value of another key."""
    if isinstance(value, dict):
        return {name: _escaped(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_escaped(entry) for entry in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
