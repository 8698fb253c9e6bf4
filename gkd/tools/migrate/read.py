"""Read old settings: a YAML file, a script or list of flags and Hydra overrides, or words of a command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gkd.config.old_names.row import Table, plain
from gkd.errors import ConfigError

_OVERRIDE = re.compile(r"^[+~]{0,2}[A-Za-z_][\w.@/-]*=")
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_LIST = re.compile(r"^\$\{?[@*]|^\$\{\w+\[[@*]\]")  # "$@" or "${ARGS[@]}", which a script adds to a command
_PROGRAM = re.compile(r"(^|/)(python[\d.]*|torchrun|accelerate|trl|deepspeed)$")
_ENGINE = re.compile(r"launch_server|vllm\.entrypoints|api_server")


def read_file(path: Path, table: Table) -> dict[str, Any]:
    """Return the settings of a file by their dotted names: of a YAML by its ending, else of a script or list of flags.

    Raises:
        ConfigError: the file does not exist, is not valid, or has no settings.
    """
    if not path.is_file():
        raise ConfigError(
            "FILE", str(path), "no such file.", "give the path of a YAML file, a script or a list of flags."
        )
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("FILE", str(path), f"cannot be read ({error}).", "give a text file.") from error
    if path.suffix in (".yaml", ".yml", ".json"):
        found = _read_yaml(path)
    else:
        found = {
            name: value for words in _script_words(text, str(path)) for name, value in settings_of(words, table).items()
        }
    if not found:
        raise ConfigError("FILE", str(path), "has no settings.", "give a YAML file, a script or a list of flags.")
    return found


def settings_of(words: Sequence[str], table: Table) -> dict[str, Any]:
    """Return the settings of `--flag value`, `--flag=value`, `--flag` and `key=value` words, by their names."""
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and len(word) > 2 or word in ("-cn", "-cp"):
            name, equals, value = word.partition("=")
            values = [value] if equals else _values(rest)
            found[_switched(name, table)] = _is_on(name, table) if not values else _value(values)
        elif _OVERRIDE.match(word):
            name, _, value = word.partition("=")
            found[name.lstrip("+~")] = _value([value])
        elif word.endswith(".py") and table.find(Path(word).name):
            found[Path(word).name] = True
    return found


def _values(rest: list[str]) -> list[str]:
    """Take the words from the start of `rest` that are values of a flag."""
    values = []
    while rest and not rest[0].startswith("--") and not rest[0].endswith(".py") and not _OVERRIDE.match(rest[0]):
        values.append(rest.pop(0))
    return [value for value in values if not _LIST.match(value)]


def _switched(flag: str, table: Table) -> str:
    """Return the name that a flag sets: `--no-save` sets `--save` if only that is listed."""
    positive = "--" + plain(flag).removeprefix("no_")
    return positive if plain(flag).startswith("no_") and not table.find(flag) and table.find(positive) else flag


def _is_on(flag: str, table: Table) -> bool:
    return _switched(flag, table) == flag


def _value(texts: Sequence[str]) -> Any:
    """Return the number, switch, list or text that words of a command line stand for."""
    if len(texts) > 1:
        return [_value([text]) for text in texts]
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"v={texts[0]}"]), resolve=False)["v"]  # type: ignore
    except Exception:  # yaml's errors have no common root that omegaconf exports; other texts are kept
        return texts[0]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:  # yaml's errors have no common root that omegaconf exports
        problem = f"is not valid YAML ({' '.join(str(error).split())})."
        raise ConfigError("FILE", str(path), problem, "correct the file, or give a script another ending.") from error
    if not OmegaConf.is_dict(loaded):
        raise ConfigError("FILE", str(path), "is not a mapping of settings.", "give a file of `key: value` lines.")
    return dict(_leaves(loaded, ""))


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values; an interpolation that cannot be resolved stays a text."""
    for part in node:
        name = f"{prefix}{part}"
        try:
            value = node[part]
        except OmegaConfBaseException:
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


def _script_words(text: str, path: str) -> list[list[str]]:
    """Return the words of each list of flags and of the training command, with the script's variables replaced."""
    words: list[list[str]] = []
    variables: dict[str, str] = {}
    for command in _commands(text, path):
        command = [_replaced(word, variables) for word in command]
        command = command[command[0] == "export" :]
        while command and (assigned := _ASSIGNMENT.match(command[0])):
            variables[assigned[1]] = assigned[2]
            command = command[1:]
        words.append(_relevant(command))
    return words


def _commands(text: str, path: str) -> list[list[str]]:
    """Return the words of each command of a shell script; the lines of an array are commands, too."""
    text = re.sub(r"(^|\s)#[^\n]*", r"\1", text).replace("\\\n", " ")
    parser = shlex.shlex(text, posix=True, punctuation_chars="();&|\n")
    parser.whitespace, parser.whitespace_split, parser.commenters = " \t\r", True, ""
    commands: list[list[str]] = [[]]
    try:
        for word in parser:
            if set(word) <= set("();&|\n"):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError as error:
        raise ConfigError("FILE", path, f"cannot be read ({error}).", "close its quotes.") from error
    return [command for command in commands if command]


def _is_setting(word: str) -> bool:
    """Return whether `a.b=c` or `+a=c` is an override, not the assignment of a shell variable."""
    name = word.partition("=")[0]
    return bool(_OVERRIDE.match(word)) and (word[0] in "+~" or "." in name)


def _replaced(word: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[0] if match[2] is None else match[2])

    return _VARIABLE.sub(value, word)


def _relevant(command: list[str]) -> list[str]:
    """Return the settings in a command: all words of a list of settings, those of a training program after its name."""
    if any(_ENGINE.search(word) for word in command):
        return []
    if "--" in command:  # ray job submit ... -- python3 train.py ...
        command = command[len(command) - command[::-1].index("--") :]
    if command and (command[0].startswith("-") or _is_setting(command[0])):
        return command
    start = next((i for i, word in enumerate(command) if _PROGRAM.search(word)), None)
    return [] if start is None or start > 2 else command[start + 1 :]
