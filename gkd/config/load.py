"""Read the settings from a YAML file and `key=value` overrides into a `gkd.config.schema.Config`, and write them.

    config = load_config("configs/quickstart_cpu.yaml", ["actor.optim.lr=1e-3"])

Imports neither torch nor ray nor an engine, so that a wrong setting is refused in less than a second.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import io
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gkd.config.check_values import value_errors
from gkd.config.foreign_keys import old_answer, suggestion
from gkd.config.schema import Config
from gkd.config.schema_actor import AUTO
from gkd.config.schema_sections import RewardFunctionConfig, all_keys, sections
from gkd.config.schema_teacher import LossTermConfig, RouteConfig
from gkd.errors import ConfigError
from teacher_server.config.declare import OTHER_BASE

_EXPECTED = {
    "int": "an integer, e.g. 100",
    "float": "a number, e.g. 0.5",
    "bool": "true or false",
    "bool | None": "auto, true or false",
    "str": "a text",
    "int | str": "steps, e.g. 100, or a time, e.g. 30min",
    "list[str]": "a list, e.g. [a, b]",
    "list[int]": "a list of integers, e.g. [0, 1]",
    "list[float]": "a list of numbers, e.g. [0.9, 0.95]",
    "dict[str, float]": "names with numbers, e.g. {truncated: 0.9}",
    "dict[str, Any]": "names with values, e.g. {enable_thinking: false}",
    "dict[str, str]": "names with texts, e.g. {<|im_end|>: <|eot_id|>}",
    "dict[str, RouteConfig]": "routes, e.g. {math: {server_port: 15555}, code: {server_port: 15556, weight: 2.0}}",
    "list[LossTermConfig]": "a list, e.g. [{name: jsd, weight: 0.5}, {name: k1}]",
    "list[RewardFunctionConfig]": "a list, e.g. [{path: exact_match}, {path: my.module:fn, weight: 0.5}]",
}
_ENTRIES: dict[str, type] = {
    "distill.losses": LossTermConfig,
    "teacher.routes": RouteConfig,
    "reward.functions": RewardFunctionConfig,
}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # OmegaConf has the same one; C permits tabs before a value


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
    errors: list[ConfigError] = []
    paths = [path] if isinstance(path, str | Path) else path or ()
    try:
        sources = [_as_lists(_read_yaml(each)) for each in paths]
    except ConfigError as error:
        return None, [error]
    for override in overrides:
        try:
            sources.append(_as_lists(_read_override(override)))
        except ConfigError as error:
            errors.append(error)
    merged, found = _merge(sources)
    errors += found + _missing(sources)
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key, problem = str(error.full_key or "config"), "its interpolation ${...} cannot be resolved."
        fix = r"name an existing key, or write the value; \${ stands for the characters ${."
        return None, [*errors, ConfigError(key, "${...}", problem, fix)]
    assert isinstance(config, Config)
    named = {name: _expanded(name, config.value(name), errors) for name, each in all_keys().items() if each.key.is_file}
    routes = dict(config.teacher.routes)
    for name, route in routes.items():
        own = {key: value for key, value in vars(route).items() if value and f"teacher.{key}" in named}
        own = {key: _expanded(f"teacher.routes.{name}.{key}", value, errors) for key, value in own.items()}
        routes[name] = dataclasses.replace(route, **own)
    return config.with_values({**named, "teacher.routes": routes}), errors


def _expanded(key: str, value: Any, errors: list[ConfigError]) -> Any:
    """Return paths with the user's home in place of ~, and variables; add an error for one that is not set."""
    if isinstance(value, list):
        return [_expanded(key, each, errors) for each in value]
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
    return dict(_leaves(OmegaConf.to_container(_read_yaml(path), resolve=False), ""))


def config_yaml(config: Config) -> str:
    """Return the resolved settings as YAML; `load_config` of a file with it gives the same config."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(dataclasses.asdict(config))))


def _escaped(value: Any) -> Any:
    r"""Return a value with \${ for each ${ of its texts, which would stand for the value of another key."""
    if isinstance(value, dict):
        return {name: _escaped(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _read_yaml(path: str | Path) -> Any:
    try:
        text = Path(path).read_text(encoding="utf-8")
        loaded, root = OmegaConf.load(io.StringIO(text)), yaml.compose(text, _LOADER)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError(
            "--config", str(path), f"no such file ({Path(path).absolute()}).", "name a YAML file."
        ) from error
    except PermissionError as error:
        raise ConfigError("--config", str(path), "this user may not read it.", "change its permissions.") from error
    except Exception as error:  # yaml's errors have no common root that omegaconf exports
        problem = f"is not valid YAML ({' '.join(str(error).split())})."
        fix = "correct the file: indent it with spaces, not with tabs, and put texts with special characters in quotes."
        raise ConfigError("--config", str(path), problem, fix) from error
    if not OmegaConf.is_dict(loaded):
        raise ConfigError("--config", str(path), "is not a mapping of sections.", "start it with e.g. `data:`.")
    return OmegaConf.create(_with_texts(root, OmegaConf.to_container(loaded, resolve=False)))


def _with_texts(node: yaml.Node | None, value: Any, key: str = "", kind: str = "") -> Any:
    """Return the value of a node with its texts as they are written: YAML reads `no` as false, 1e3 as 1000.0.

    Args:
        kind: type of the value, if it is a part of a key's value.

    Raises:
        ConfigError: a name has a dot; or YAML reads a number in base 60 (1:30 is 90) or 8 (010 is 8).
    """
    if not kind and key in all_keys():
        kind = all_keys()[key].type
    if isinstance(node, yaml.MappingNode) and isinstance(value, dict):
        yaml.constructor.SafeConstructor().flatten_mapping(node)  # what `<<` merges comes first
        for name, each in {name.value: each for name, each in node.value}.items():
            inner = f"{key}.{name}" if key else name
            if "." in str(name) and key in ("", *sections()):
                fix = f"write {inner.replace('.', ': {')}: VALUE{'}' * inner.count('.')}."
                raise ConfigError(inner, each.value, "a file nests its keys; dots are for arguments.", fix)
            if name in value:
                value[name] = _with_texts(each, value[name], inner, _part(kind, name))
    elif isinstance(node, yaml.SequenceNode) and isinstance(value, list):
        return [_with_texts(each, part, key, _part(kind)) for each, part in zip(node.value, value, strict=True)]
    elif isinstance(node, yaml.ScalarNode) and not node.style and not node.tag.endswith(":null"):
        if kind == "str":
            return node.value
        if kind == "int" and isinstance(value, float) and value.is_integer():
            return int(value)  # 8.0
        if node.tag.endswith((":int", ":float")) and OTHER_BASE.fullmatch(node.value):
            problem = f"YAML reads it as {yaml.safe_load(node.value)}."
            raise ConfigError(key, node.value, problem, "write a decimal number, or put a text into quotes.")
    return value


def _part(kind: str, name: str = "") -> str:
    """Return the type of an entry of a list or of names, or of the key of an entry."""
    for entry in _ENTRIES.values():
        if kind == entry.__name__:
            return next((str(item.type) for item in dataclasses.fields(entry) if item.name == name), "").split(" |")[0]
    return re.sub(r"(list\[|dict\[str, )(.+)\]", r"\2", kind)


def _read_override(override: str) -> Any:
    key, sep, value = override.partition("=")
    if not sep or not key:
        raise ConfigError("override", override, "is not of the form key=value.", "write e.g. actor.tp=2.")
    known = all_keys().get(key)
    if not value and known and known.type == "str" and not known.key.required and not known.key.choices:
        override = f"{key}=''"  # a shell removes the quotes of key=""
    try:
        if known and known.type == "str" and value not in ("", "null", "~") and value.lstrip()[0:1] not in ("'", '"'):
            # YAML would join the lines of a text, cut it at " #", and read 1e5 and off as other values.
            text = OmegaConf.create()
            OmegaConf.update(text, key, value)
            return text
        node = yaml.compose(value, _LOADER)
        for part in reversed(key.split(".")):
            node = yaml.MappingNode("", [(yaml.ScalarNode("", part), node)])
        loaded = OmegaConf.from_dotlist([override])
        return OmegaConf.create(_with_texts(node, OmegaConf.to_container(loaded, resolve=False)))
    except ConfigError:
        raise
    except Exception as error:  # yaml's errors have no common root that omegaconf exports
        raise ConfigError(key, value, "is not valid YAML.", "close brackets and quotes.") from error


def _as_lists(source: Any) -> Any:
    """Return the source with values for words: auto is an empty list of GPUs, or None of a bool; one URL is a list."""
    plain: Any = OmegaConf.to_container(source, resolve=False)
    if isinstance(plain.get("cluster"), dict) and plain["cluster"].get("gpus") == "auto":
        source.cluster.gpus = []
    for name in ("packing", "fused_lm_head"):
        if isinstance(plain.get("actor"), dict) and plain["actor"].get(name) == AUTO:
            source.actor[name] = None
    teacher = found if isinstance(found := plain.get("teacher"), dict) else {}
    if isinstance(url := teacher.get("url"), str):
        source.teacher.url = [url] if url else []
    routes = found if isinstance(found := teacher.get("routes"), dict) else {}
    for name, route in routes.items():
        if isinstance(route, dict) and isinstance(route.get("url"), str):
            source.teacher.routes[name].url = [route["url"]]
    return source


@cache
def _pickled_defaults() -> bytes:
    return pickle.dumps(OmegaConf.structured(Config))


def _defaults() -> Any:
    return pickle.loads(_pickled_defaults())  # takes a seventh of the time of a deep copy


def _merge(sources: Sequence[Any]) -> tuple[Any, list[ConfigError]]:
    """Merge sources into the defaults, all at once if they are right, because each merge copies the settings."""
    try:
        return OmegaConf.unsafe_merge(_defaults(), *copy.deepcopy(sources)), []  # unsafe: it changes its arguments
    except (OmegaConfBaseException, TypeError):
        merged, errors = _defaults(), list[ConfigError]()
    for source in sources:
        try:
            merged = OmegaConf.merge(merged, source)
        except (OmegaConfBaseException, TypeError) as error:
            merged, found = _merge_by_key(merged, source)
            if not found:
                raise ConfigError("config", OmegaConf.to_yaml(source), "cannot be read.", "correct it.") from error
            errors += found
    return merged, errors


def _missing(sources: Sequence[Any]) -> list[ConfigError]:
    """Return an error for each `???`, Hydra's mark of a value to set, that no later source sets."""
    missing: set[str] = set()
    for source in sources:
        for key, value in _leaves(OmegaConf.to_container(source, resolve=False), ""):
            (missing.add if _has_missing(value) else missing.discard)(key)
    problem, fix = "has no value yet.", "write the value, or leave the key out for its default."
    return [ConfigError(key, MISSING, problem, fix) for key in sorted(missing & all_keys().keys())]


def _has_missing(value: Any) -> bool:
    """Return whether a value, or a part of a list or mapping, is `???`."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value == MISSING or any(map(_has_missing, parts))


def _merge_by_key(merged: Any, source: Any) -> tuple[Any, list[ConfigError]]:
    """Merge each key of a source on its own. Return the result and an error for each key that cannot be merged."""
    errors: list[ConfigError] = []
    unknown: dict[str, Any] = {}
    result = merged
    for key, value in _leaves(OmegaConf.to_container(source, resolve=False), ""):
        if key in sections():
            fix = old_answer(key) or f"set its keys, as {key}.KEY=VALUE."
            errors.append(ConfigError(key, value, "is a section, not a key.", fix))
        elif key not in all_keys():
            unknown[key] = value
        else:
            leaf: Any = value
            for part in reversed(key.split(".")):
                leaf = {part: leaf}
            try:
                result = OmegaConf.merge(result, leaf)
            except (OmegaConfBaseException, TypeError) as error:
                errors.append(_wrong_type(key, value, error))
    return result, [*_unknown(unknown), *errors]


def _unknown(values: Mapping[str, Any]) -> list[ConfigError]:
    """Return an error for each key that does not exist; more than one that no known name is like share the last one."""
    hints = {key: suggestion(key) for key in values}
    errors = [ConfigError(key, values[key], "there is no such key.", hint) for key, hint in hints.items() if hint]
    if others := [key for key in values if not hints[key]]:
        name = others[0] if len(others) == 1 else f"{len(others)} other keys"
        value = values[name] if len(others) == 1 else others
        fix = "remove it, or see the keys in gkd train --help and the names of other systems in docs/coming_from.md."
        errors.append(ConfigError(name, value, "there is no such key.", fix))
    return errors


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for part, value in tree.items():
        key = f"{prefix}{part}"
        if isinstance(value, dict) and key not in all_keys() and (value or key in sections()):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _wrong_type(key: str, value: object, error: Exception) -> ConfigError:
    kind = all_keys()[key].type
    expected = _EXPECTED[kind]
    if value is None:
        fix = all_keys()[key].key.required or f"give {expected}, or leave the key out."
        return ConfigError(key, "", "is empty.", fix)
    if isinstance(value, dict) and (names := [name for name in value if not isinstance(name, str)]):
        return ConfigError(key, value, f"YAML reads a name as {names[0]!r}.", "put the name into quotes.")
    if isinstance(error, OmegaConfBaseException) and (entries := _entries(key, value)):
        return _wrong_entry(key, entries, error)
    if kind.startswith("list") and isinstance(value, str | int | float):
        return ConfigError(key, value, "is not a list.", f"write [{value}].")
    return ConfigError(key, value, "has the wrong type.", f"give {expected}.")


def _entries(key: str, value: object) -> dict[str, Any]:
    """Return the entries of a key of `_ENTRIES` by their names in an error; empty means another key."""
    if key in _ENTRIES and isinstance(value, list):
        return {f"{key}[{i}]": entry for i, entry in enumerate(value)}
    if key in _ENTRIES and isinstance(value, dict):
        return {f"{key}.{name}": entry for name, entry in value.items()}
    return {}


def _wrong_entry(key: str, entries: Mapping[str, Any], error: OmegaConfBaseException) -> ConfigError:
    """Return the error for one entry; OmegaConf names its key without the list."""
    types = {item.name: str(item.type).partition(" |")[0] for item in dataclasses.fields(_ENTRIES[key])}
    for where, entry in entries.items():
        for name, value in entry.items() if isinstance(entry, dict) else ():
            if name not in types:
                nearest = difflib.get_close_matches(name, types, n=1, cutoff=0.4)
                hint = f"did you mean {nearest[0]}?" if nearest else f"use {', '.join(types)}."
                return ConfigError(f"{where}.{name}", value, "there is no such key.", hint)
            if str(error.full_key or error.key).rpartition(".")[2] == name:
                expected = _EXPECTED[types[name]]
                return ConfigError(f"{where}.{name}", value, "has the wrong type.", f"give {expected}.")
    return ConfigError(key, list(entries.values()), "has a wrong entry.", f"give {_EXPECTED[all_keys()[key].type]}.")
