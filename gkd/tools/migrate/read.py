"""Read old settings: a YAML file with its base files, a script or list of flags, or words of a command line."""

from __future__ import annotations

import ast
import math
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gkd.config.dialects.table import Dialect, dialects, plain
from gkd.errors import ConfigError

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
        return path.read_text(encoding="utf-8")
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


# Read the settings of a shell script: the words of its training command, with variables and arrays replaced.


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^${}]*))?\}|(\w+))")  # the innermost of nested ones
_ARRAY = re.compile(r"\$\{?(\w+|[@*])(?:\[[@*]\])?\}?")  # "$@", "${ARGS[@]}" or $ARGS as a whole word
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)", re.DOTALL)
_PROGRAM = re.compile(r"(^|/)(python[\d.]*|torchrun|accelerate|trl|deepspeed|swift|megatron|uv)$")
_SERVERS = re.compile(r"launch_server|vllm\.entrypoints|api_server|^(deploy|rollout|vllm-serve)$")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIGNS = "();&|\n"
_OPENING, _CLOSING = ("if", "case", "for", "while", "until"), ("fi", "esac", "done", "}")
_MOST_NESTED = 20


def read_script(text: str, path: str) -> tuple[list[str], dict[str, str]]:
    """Return the words of a script's training command or lists of flags, and its variables.

    Raises:
        ConfigError: the script cannot be read, or has several training commands.
    """
    variables = {"HOME": os.path.expanduser("~")}
    arrays: dict[str, list[str]] = {}
    commands: list[list[str]] = []
    for command, depth in _commands(text, path, arrays, variables):
        words = command[command[0] in ("export", "declare", "local") :]
        while words and (assigned := _ASSIGNMENT.fullmatch(words[0])) and not _is_setting(words[0]):
            name, before = assigned[1], variables.get(assigned[1])
            value = (before or "") * bool(assigned[2]) + _replaced(assigned[3], variables)
            if depth and not assigned[2] and before not in (None, value):  # open: only some runs replace it
                value = f"--{name}[@]" if value.lstrip().startswith("--") else f"${name}"
            variables[name] = value
            words = words[1:]
        words = [each for word in words for each in _expanded(word, arrays, variables)]
        if not any(_SERVERS.search(word) for word in words[:6]) and words:
            commands.append(words)
    lists = [word for command in commands if _is_list(command) for word in command]
    training = sorted((_arguments(command) for command in commands if not _is_list(command)), key=_size, reverse=True)
    if len(training) > 1 and _size(training[1]) > max(_size(training[0]) // 2, 3):
        raise ConfigError("FILE", path, "has several training commands.", "keep one of them in a copy of the file.")
    return [*lists, *(training[0] if training else ())], variables


def is_flag(word: str) -> bool:
    """Return whether a word is a flag with two dashes, or one of Hydra's two short ones."""
    return word.startswith("--") and len(word) > 2 or word in ("-cn", "-cp")


def is_override(word: str) -> bool:
    """Return whether a word is an override like Hydra's: `a.b=c`, `+a=c`."""
    return re.match(r"[+~]{0,2}[A-Za-z_][\w.@/-]*=", word) is not None


def _is_setting(word: str) -> bool:
    """Return whether `a.b=c` or `+a=c` is an override, not the assignment of a shell variable."""
    return is_override(word) and (word[0] in "+~" or "." in word.partition("=")[0])


def _is_list(command: list[str]) -> bool:
    return command[0].startswith("-") or _is_setting(command[0])


def _size(words: list[str]) -> int:
    return sum(is_flag(word) or is_override(word) for word in words)


def _arguments(command: list[str]) -> list[str]:
    """Return the training program and the words after it; none if the command starts no program that trains."""
    if "--" in command:  # ray job submit ... -- python3 train.py ...
        command = command[len(command) - command[::-1].index("--") :]
    programs = [i for i, word in enumerate(command) if _PROGRAM.search(word)]
    if not programs or programs[0] > 2:
        return []
    is_wrapped = command[programs[0]].endswith("uv") and len(programs) > 1  # uv run --frozen python3 train.py ...
    return command[programs[is_wrapped] :]


def _commands(
    text: str, path: str, arrays: dict[str, list[str]], variables: dict[str, str]
) -> Iterator[tuple[list[str], int]]:
    """Yield the words of each command, and how many conditions, loops and functions it is in; after && and || one more.

    The words of `NAME=(...)` go to the arrays instead. An array that only some runs replace has the word `--NAME[@]`.
    """
    text = re.sub(r"(^|\s)#[^\n]*", r"\1", text).replace("\\\n", " ")
    text = _ARITHMETIC.sub(lambda match: f"$[{''.join(match[1].split()).translate({40: 91, 41: 93})}]", text)
    parser = shlex.shlex(text, posix=True, punctuation_chars=_SIGNS)
    parser.whitespace, parser.whitespace_split, parser.commenters = " \t\r", True, ""
    command: list[str] = []
    array: list[str] | None = None
    before: list[str] | None = None
    name, depth, before_it = "", 0, ""
    try:
        for word in parser:
            is_sign = set(word) <= set(_SIGNS)
            if is_sign and array is not None:
                if ")" not in word:
                    continue
                if (depth or before_it in ("&&", "||")) and before not in (None, array):
                    array[:] = [f"--{name}[@]"]
                array, before_it = None, word.strip(")")
            elif array is not None:
                array += _expanded(word, arrays, variables)
            elif is_sign and word[0] == "(" and command and (found := re.fullmatch(r"(\w+)(\+?)=", command[-1])):
                name, before = found[1], None if found[2] else arrays.get(found[1])
                array = arrays[name] = [*arrays.get(name, ())] if found[2] else []
                command.pop()
            elif not is_sign:
                command.append(word)
            elif command:
                if command[0] == "function" and "{" in command:
                    command = command[command.index("{") :]
                depth += command[0] == "{"
                while command[0] in ("then", "else", "do", "{") and command[1:]:
                    command = command[1:]
                depth += (command[0] in _OPENING) - (command[0] in _CLOSING and depth > 0)
                yield command, depth + (before_it in ("&&", "||"))
                command, before_it = [], word
            elif is_sign:
                before_it = word
    except ValueError as error:
        raise ConfigError("FILE", path, f"cannot be read ({error}).", "close its quotes.") from error
    if command:
        yield command, depth + (before_it in ("&&", "||"))


def _expanded(word: str, arrays: dict[str, list[str]], variables: dict[str, str]) -> list[str]:
    """Return the words that a word stands for: the words of an array or of a variable with flags, or one text."""
    if found := _ARRAY.fullmatch(word):
        if found[1] in arrays:
            return arrays[found[1]]
        if found[1] in "@*":
            return []  # arguments of the script
        if "[" in word:
            return [f"--{found[1]}[@]"]  # an array of another file: the report names it
        if (value := variables.get(found[1], "")).lstrip().startswith("--"):
            return shlex.split(value)
    return [_replaced(word, variables)]


def _replaced(word: str, variables: dict[str, str]) -> str:
    """Return a word with the variables that have a value, and with arithmetic of numbers computed."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[0] if match[2] is None else match[2])

    for _ in range(_MOST_NESTED):  # ${A:-$((B - C))} has the value of the arithmetic as its default
        found = _VARIABLE.sub(value, word)
        found = re.sub(r"\$\[(.*)\]", lambda match: _computed(match[1], variables, match[0]), found)
        if found == word:
            break
        word = found
    return word


def _computed(text: str, variables: dict[str, str], otherwise: str) -> str:
    """Return the value of a shell's arithmetic; what has another form than + - * / % of numbers stays as it is."""
    text = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), text.translate({91: 40, 93: 41}))
    try:
        return str(_number(ast.parse(text, mode="eval").body))
    except (SyntaxError, KeyError, ValueError, ZeroDivisionError):
        return otherwise


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return int(_OPERATORS[type(node.op)](_number(node.left), _number(node.right)))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(ast.dump(node))
