"""Read settings from YAML files and `key=value` words into the dataclass that declares them, through OmegaConf.

    tree = read_file("x.yaml", Config)
    config, problems = merge(Config, keys, [tree, read_word("actor.tp=2", Config)])

The declared type decides how a value is read: YAML alone would read the text `no` as false, and 1:30 as 90.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from teacher_server.config.declare import Declared, Setting, keys_of

T = TypeVar("T")
Keys = Mapping[str, Declared[Any]]
Tree = dict[str, Any]
_NULL, _TEXT, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("null", "str", "int", "float"))
_OTHER_BASE = re.compile(r"[-+]?0[0-9_]+|.*:.*")  # numbers that YAML reads in base 8 (010) or 60 (1:30)
_EXAMPLES = {
    "int": "an integer, e.g. 100",
    "float": "a number, e.g. 0.5",
    "bool": "true or false",
    "str": "a text",
    "Path": "a path",
    "list[str]": "a list, e.g. [a, b]",
    "list[int]": "a list of integers, e.g. [0, 1]",
    "list[float]": "a list of numbers, e.g. [0.9, 0.95]",
    "dict[str, float]": "names with numbers, e.g. {math: 0.5}",
    "dict[str, str]": "names with texts, e.g. {<|im_end|>: <|eot_id|>}",
    "dict[str, Any]": "names with values, e.g. {enable_thinking: false}",
}


class Problem(NamedTuple):
    """Describe what is wrong with the value of a key, and what to write instead."""

    key: str
    value: object
    problem: str
    fix: str


class Unreadable(Exception):
    """A file or a word cannot be read. The arguments are those of `Problem`."""

    def __init__(self, key: str, value: object, problem: str, fix: str) -> None:
        self.problem = Problem(key, value, problem, fix)
        super().__init__(key, value, problem, fix)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # C permits tabs before a value
    """Read 1e-4 as a number, as YAML 1.2 does, and a date as a text."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(_FLOAT, re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"), "-+.0123456789")


def read_file(path: str | Path, cls: type) -> Tree:
    """Return the values of a YAML file for a dataclass. Raises Unreadable."""
    where = str(path)
    try:
        tree = _parse(Path(path).read_text(encoding="utf-8"), cls, "")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        problem = f"no such file ({Path(path).absolute()})."
        raise Unreadable("--config", where, problem, "name a YAML file.") from error
    except PermissionError as error:
        raise Unreadable("--config", where, "this user may not read it.", "change its permissions.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        problem = f"is not valid YAML ({' '.join(str(error).split())})."
        fix = "correct the file: indent it with spaces, not with tabs, and put texts with special characters in quotes."
        raise Unreadable("--config", where, problem, fix) from error
    if not isinstance(tree, dict | None):
        raise Unreadable("--config", where, "is not a mapping of settings.", "write one `key: value` a line.")
    return tree or {}


def read_word(word: str, cls: type) -> Tree:
    """Return the value of `key=value` for a dataclass. Raises Unreadable.

    A text needs no quotes: YAML would join its lines and cut it at " #".
    """
    key, sep, value = word.partition("=")
    if not sep or not key:
        raise Unreadable("override", word, "is not of the form key=value.", "write e.g. actor.tp=2.")
    names = key.split(".")
    kind = functools.reduce(_item_type, names, cls)
    tree: Any = value
    if not _is_text(kind) or value in ("null", "~") or value.lstrip()[:1] in ("'", '"'):
        try:
            tree = _parse(value, kind, key)
        except (yaml.YAMLError, RecursionError) as error:
            raise Unreadable(key, value, "is not valid YAML.", "close brackets and quotes.") from error
    for name in reversed(names):
        tree = {name: tree}
    assert isinstance(tree, dict)
    return tree


def _parse(text: str, kind: Any, key: str) -> Any:
    """Return the values of a YAML text. Raises yaml.YAMLError, Unreadable."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _set_tags(loader, node, kind, key)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _set_tags(loader: Any, node: yaml.Node, kind: Any, key: str) -> None:
    """Give the scalars without quotes the types that are declared. Names are texts.

    Args:
        kind: declared type of the node; None for a key that does not exist.

    Raises:
        Unreadable: a name has a dot or is written twice; or YAML reads a number in base 60 (1:30 is 90) or 8.
    """
    if isinstance(node, yaml.MappingNode):
        _check_names([name.value for name, _ in node.value], kind, key)
        loader.flatten_mapping(node)  # what `<<` merges comes first
        for name, value in node.value:
            name.tag = _TEXT
            _set_tags(loader, value, _item_type(kind, name.value), f"{key}.{name.value}" if key else name.value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _set_tags(loader, value, _item_type(kind, ""), key)
    elif not node.style and node.tag != _NULL:
        if _is_text(kind):
            node.tag = _TEXT
        elif node.tag in (_INT, _FLOAT) and _OTHER_BASE.fullmatch(node.value):
            number = loader.construct_yaml_int(node) if node.tag == _INT else loader.construct_yaml_float(node)
            fix = "write a decimal number, or put a text into quotes."
            raise Unreadable(key, node.value, f"YAML reads it as {number}.", fix)
        elif node.tag == _FLOAT and int in _types(kind) and loader.construct_yaml_float(node).is_integer():
            node.tag = _INT  # 8.0 is 8
            node.value = str(int(loader.construct_yaml_float(node)))


def _check_names(names: Sequence[str], kind: Any, key: str) -> None:
    prefix = f"{key}." if key else ""
    for i, name in enumerate(names):
        whole = f"{prefix}{name}"
        if name in names[:i]:
            raise Unreadable(whole, "", "is written twice.", "remove one of them.")
        if "." in str(name) and dataclasses.is_dataclass(kind):
            fix = f"write {whole.replace('.', ': {')}: VALUE{'}' * whole.count('.')}."
            raise Unreadable(whole, "", "a file nests its keys; dots are for arguments.", fix)


def _types(kind: Any) -> tuple[Any, ...]:
    """Return the types of which a value may have one: those of a union, without None."""
    is_union = type(kind).__name__ == "UnionType"
    return tuple(member for member in get_args(kind) if member is not type(None)) if is_union else (kind,)


def _is_text(kind: Any) -> bool:
    return _types(kind) in ((str,), (Path,))


def _item_type(kind: Any, name: str) -> Any:
    """Return the type of a field of a dataclass, or of an entry of a list or mapping; None for a name without one."""
    item: Any = _types(kind)[0]
    return _hints(item).get(name) if dataclasses.is_dataclass(item) else (get_args(item) or (None,))[-1]


_hints: Callable[[Any], Mapping[str, Any]] = functools.cache(get_type_hints)


def merge(
    cls: type[T], keys: Keys, trees: Iterable[Tree], unknown: Callable[[Mapping[str, Any]], Iterable[Problem]]
) -> tuple[T | None, list[Problem]]:
    """Return the defaults, updated by trees of which later ones win, and what is wrong with their types and keys.

    A key that is wrong keeps its default. The result is None if an interpolation cannot be resolved.

    Args:
        keys: of the dataclass.
        unknown: returns the problems of the keys that do not exist.
    """
    schema: Any = cls
    config = copy.deepcopy(_defaults(schema))
    foreign: Tree = {}
    missing: set[str] = set()
    problems: list[Problem] = []
    for tree in trees:
        for key, value in leaves(tree, keys):
            if key not in keys:
                foreign[key] = value
            elif _is_missing(value):
                missing.add(key)
            else:
                missing.discard(key)
                problems += _set(config, keys[key], value)
    fix = "write the value, or leave the key out for its default."
    problems += [Problem(key, MISSING, "has no value yet.", fix) for key in sorted(missing)]
    problems = [*unknown(foreign), *problems]
    try:
        result = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        fix = r"name an existing key, or write the value; \${ stands for the characters ${."
        key = str(error.full_key or "config")
        return None, [*problems, Problem(key, "${...}", "its interpolation ${...} cannot be resolved.", fix)]
    assert isinstance(result, cls)
    return result, problems


@functools.cache
def _defaults(cls: Any) -> Any:
    config = OmegaConf.structured(cls)
    _make_writable(config)
    return config


def _make_writable(config: Any) -> None:
    """Let OmegaConf write what a frozen dataclass has made read-only."""
    OmegaConf.set_readonly(config, None)
    for name in config if OmegaConf.is_dict(config) else ():
        if OmegaConf.is_dict(config._get_node(name)):
            _make_writable(config[name])


def leaves(tree: Mapping[str, Any], keys: Keys, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree by dotted key; those of keys that do not exist one by one."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        is_section = any(key_name.startswith(f"{key}.") for key_name in keys)
        if isinstance(value, dict) and key not in keys and (value or is_section):
            yield from leaves(value, keys, f"{key}.")
        else:
            yield key, value


def _is_missing(value: Any) -> bool:
    """Return whether a value, or a part of it, is `???`: Hydra's mark of a value that a later source has to set."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value == MISSING or any(map(_is_missing, inner))


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the fix for a name that does not exist."""
    near = difflib.get_close_matches(name, names := list(names), n=1, cutoff=0.4)
    return f"did you mean {near[0]}?" if near else f"use {', '.join(names)}."


def _set(config: Any, key: Declared[Any], value: Any) -> list[Problem]:
    """Set the value of a key, and return what is wrong with it."""
    try:
        OmegaConf.update(config, key.name, value if key.setting.read is None else key.setting.read(value))
    except (OmegaConfBaseException, TypeError, ValueError):
        OmegaConf.update(config, key.name, key.default, merge=False)
        return _wrong_type(key, value)
    return []


def limit_problems(keys: Keys, value_of: Callable[[str], Any]) -> Iterator[Problem]:
    """Yield what is outside of the declared limits of keys, and of the keys of their entries."""
    for name, key in keys.items():
        value = value_of(name)
        allowed = key.setting.allowed()
        if key.setting.required and not value:
            yield Problem(name, value, "is empty.", key.setting.required)
        elif key.setting.is_valid(value) or (value is None and key.default is None):
            for where, entry in entries(name, value).items():
                if dataclasses.is_dataclass(entry):
                    for problem in limit_problems(keys_of(type(entry), Setting), functools.partial(getattr, entry)):
                        yield problem._replace(key=f"{where}.{problem.key}")
        elif key.setting.choices:
            yield Problem(name, value, "is not one of the choices.", f"use one of: {allowed}.")
        else:
            yield Problem(name, value, "is out of range.", f"use {allowed or 'a finite number'}.")


def _wrong_type(key: Declared[Any], value: object) -> list[Problem]:
    expected = _expected(key.setting, key.type)
    if value is None:
        return [Problem(key.name, "", "is empty.", key.setting.required or f"give {expected}, or leave the key out.")]
    if problems := _wrong_entries(key, value):
        return problems
    if key.type.startswith("list") and key.setting.read is None and isinstance(value, str | int | float):
        return [Problem(key.name, value, "is not a list.", f"write [{value}].")]
    return [Problem(key.name, value, "has the wrong type.", f"give {expected}.")]


def _expected(setting: Setting, type_name: str) -> str:
    expected = setting.example or _EXAMPLES[type_name.removesuffix(" | None")]
    return f"{expected} ({allowed})" if (allowed := setting.allowed()) else expected


def entries(key: str, value: object) -> dict[str, Any]:
    """Return the entries of a list or mapping by their places, like `distill.losses[0]`; none for another value."""
    if isinstance(value, list):
        return {f"{key}[{i}]": entry for i, entry in enumerate(value)}
    return {f"{key}.{name}": entry for name, entry in value.items()} if isinstance(value, dict) else {}


def _wrong_entries(key: Declared[Any], value: object) -> list[Problem]:
    """Return what is wrong in the entries of a key whose entries are dataclasses; empty for another key."""
    entry_type = _item_type(_hints(key.owner)[key.name.rpartition(".")[2]], "")
    problems: list[Problem] = []
    for where, entry in entries(key.name, value).items() if dataclasses.is_dataclass(entry_type) else ():
        for name, item in entry.items() if isinstance(entry, dict) else ():
            if name not in _hints(entry_type):
                fix = nearest(name, _hints(entry_type))
                problems.append(Problem(f"{where}.{name}", item, "this key does not exist.", fix))
                continue
            try:
                OmegaConf.update(OmegaConf.structured(entry_type), name, item)
            except (OmegaConfBaseException, TypeError):
                kind = next(str(field.type) for field in dataclasses.fields(entry_type) if field.name == name)
                fix = f"give {_expected(Setting(), kind)}."
                problems.append(Problem(f"{where}.{name}", item, "has the wrong type.", fix))
    return problems
