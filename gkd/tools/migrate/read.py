"""Read old settings: a YAML file with its base files, a script or list of flags, or words of a command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gkd.config.dialects.table import Dialect, dialects, plain
from gkd.errors import ConfigError
from gkd.tools.migrate.shell import is_flag, is_override, read_script

_YAML = (".yaml", ".yml", ".json")
_SELF = "_self_"  # entry of Hydra's `defaults`
_RESOLVERS: dict[str, Callable[..., Any]] = {  # resolvers that the other systems register
    "mul": lambda *numbers: math.prod(numbers),
    "add": lambda *numbers: sum(numbers),
    "sub": lambda a, b: a - b,
    "div": lambda a, b: a // b if a % b == 0 else a / b,
    "max": lambda *numbers: max(numbers),
    "min": lambda *numbers: min(numbers),
}


@dataclass(slots=True)
class Old:
    """Hold the content of a file or a command line: settings by dotted names or flags, words, shell variables."""

    settings: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def of(self, dialect: Dialect) -> dict[str, Any]:
        """Return the settings as a dialect names them: `--no-save` is `--save` off; programs and variables, too."""
        found: dict[str, Any] = {}
        for name, value in self.settings.items():
            positive = "--" + plain(name).removeprefix("no_")
            is_off = value is True and plain(name).startswith("no_") and not dialect.find(name)
            if is_off and dialect.find(positive):
                found[positive] = False
            else:
                found[name] = value
        found |= {name: True for name in self.words if dialect.knows(name)}
        variables = {name: text for name, text in self.variables.items() if name.isupper() and dialect.knows(name)}
        return {name: _value([text]) for name, text in variables.items()} | found


def read_file(path: Path, given: Mapping[str, Any]) -> Old:
    """Return the settings of a file: of a YAML by its ending, else of a script or list of flags.

    Args:
        given: settings that replace the file's; in a YAML, other values may refer to them.

    Raises:
        ConfigError: the file or a base of it does not exist, is not valid, or has no settings.
    """
    if path.suffix in _YAML:
        found = Old(_read_yaml(path, given))
    else:
        words, variables = read_script(_text(path), str(path))
        found = settings_of(words)
        found.variables = variables
    if not found.settings:
        raise ConfigError("FILE", str(path), "has no settings.", "give a YAML file, a script or a list of flags.")
    return found


def settings_of(words: Sequence[str]) -> Old:
    """Return the settings of `--flag value`, `--flag=value`, `--flag` and `key=value` words, by their names."""
    found = Old()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if is_flag(word):
            name, equals, value = word.partition("=")
            values = [value] if equals else _values(rest)
            found.settings |= _flat(name, _value(values) if values else True)
        elif is_override(word):
            name, _, value = word.partition("=")
            found.settings[name.lstrip("+~")] = _value([value])
        else:
            found.words.append(Path(word).name)
    return found


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Return a setting; a mapping's setting, as in `--kwargs '{"a": 1}'`, by the names of its values."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {each: found for key, inner in value.items() for each, found in _flat(f"{name}.{key}", inner).items()}


def _values(rest: list[str]) -> list[str]:
    """Take the words from the start of `rest` that are values of a flag."""
    values = []
    while rest and not (is_flag(rest[0]) or is_override(rest[0]) or rest[0].endswith(".py") or rest[0] == "-m"):
        values.append(rest.pop(0))
    return values


def _value(texts: Sequence[str]) -> Any:
    """Return the number, switch, list or text that words of a command line stand for."""
    if len(texts) > 1:
        return [_value([text]) for text in texts]
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"v={texts[0]}"]), resolve=False)["v"]  # type: ignore
    except Exception:  # yaml's errors have no common root that omegaconf exports; other texts are kept
        return texts[0]


def _text(path: Path) -> str:
    if not path.is_file():
        fix = "give the path of a YAML file, a script or a list of flags."
        raise ConfigError("FILE", str(path), "no such file.", fix)
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("FILE", str(path), f"cannot be read ({error}).", "give a text file.") from error


def _read_yaml(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    for name, resolver in _RESOLVERS.items():
        OmegaConf.register_resolver(name, resolver, replace=True)
    loaded = _with_bases(path, ())
    for name, value in given.items():
        if not is_flag(name):
            OmegaConf.update(loaded, name, value, force_add=True)
    return dict(_leaves(loaded, ""))


def _with_bases(path: Path, above: tuple[Path, ...]) -> DictConfig:
    """Return a YAML with the files that its `defaults` names below it. Raises ConfigError if one is missing."""
    text = _text(path)
    try:
        loaded = OmegaConf.create(text)
    except Exception as error:  # yaml's errors have no common root that omegaconf exports
        problem = f"is not valid YAML ({' '.join(str(error).split())})."
        raise ConfigError("FILE", str(path), problem, "correct the file, or give a script another ending.") from error
    if not OmegaConf.is_dict(loaded) or not all(isinstance(name, str) for name in loaded):
        raise ConfigError("FILE", str(path), "is not a mapping of settings.", "give a file of `key: value` lines.")
    assert isinstance(loaded, DictConfig)
    named = loaded.get("defaults", ())
    bases = [path.parent / each for each in ([named] if isinstance(named, str) else named) if _is_file(each)]
    for base in bases:
        if base.resolve() in (*above, path.resolve()) or not base.is_file():
            problem = f"its base file {base} is missing, or is based on this file."
            raise ConfigError("FILE", str(path), problem, "put the files that `defaults` names in that place.")
    if bases:
        del loaded["defaults"]
    return OmegaConf.merge(*(_with_bases(base, (*above, path.resolve())) for base in bases), loaded)  # type: ignore


def _is_file(named: Any) -> bool:
    """Return whether an entry of `defaults` is a path; Hydra's own are names of its groups."""
    return isinstance(named, str) and named != _SELF and named.endswith(_YAML)


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values; an interpolation that cannot be resolved stays a text."""
    for part in node:
        name = f"{prefix}{part}"
        try:
            value = node[part]
        except Exception:  # a resolver or OmegaConf failed: the text stays, and the report names it
            value = OmegaConf.to_container(node, resolve=False)[part]  # type: ignore[index]
        if OmegaConf.is_dict(value) and len(value):
            yield from _leaves(value, f"{name}.")
        elif OmegaConf.is_config(value):
            yield name, _plain_list(value)
        else:
            yield name, value


def _plain_list(value: Any) -> Any:
    try:
        return OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException:
        return OmegaConf.to_container(value, resolve=False)


def names() -> list[str]:
    """Return what the command line accepts: systems, and dialects."""
    return list(dict.fromkeys([each.system for each in dialects().values()] + list(dialects())))


def find_dialect(asked: str, old: Old) -> Dialect:
    """Return the dialect of settings: the one whose program they start, else the one with the most names of its own.

    Args:
        asked: a dialect, which is then taken; a system, whose dialects are tried; if empty, all are tried.

    Raises:
        ConfigError: `asked` is not known, or the settings fit none or several dialects.
    """
    if asked in dialects():
        return dialects()[asked]
    tried = [each for each in dialects().values() if asked in ("", each.system)]
    if not tried:
        raise ConfigError("SYSTEM", asked, "is not a known system.", f"use one of {', '.join(names())}.")
    scores = {each.name: _score(each, old) for each in tried}
    best = [name for name, score in scores.items() if score == max(scores.values())]
    if len(best) == 1 and (len(tried) == 1 or scores[best[0]] > (0, 0)):
        return dialects()[best[0]]
    problem = f"the settings fit {'several' if any(max(scores.values())) else 'none'} of {', '.join(best)}."
    raise ConfigError("SYSTEM", asked, problem, "name the dialect: python -m gkd.tools.migrate DIALECT FILE.")


def _score(dialect: Dialect, old: Old) -> tuple[int, int]:
    """Return how many words of the command, and how many names, only this dialect has."""
    found = [plain(name) for name in old.settings]
    programs = sum(any(fnmatchcase(word, pattern) for word in old.words) for pattern in dialect.programs)
    return programs, sum(any(fnmatchcase(name, plain(pattern)) for name in found) for pattern in dialect.detect)
