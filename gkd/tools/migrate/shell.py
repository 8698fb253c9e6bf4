"""Read the settings of a shell script: the words of its training command, with variables and arrays replaced."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator

from gkd.errors import ConfigError

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
_MOST_NESTED = 20


def read_script(text: str, path: str) -> tuple[list[str], dict[str, str]]:
    """Return the words of a script's training command or lists of flags, and its variables.

    Raises:
        ConfigError: the script cannot be read, or has several training commands.
    """
    variables = {"HOME": os.path.expanduser("~")}
    arrays: dict[str, list[str]] = {}
    commands: list[list[str]] = []
    for command in _commands(text, path, arrays, variables):
        words = command[command[0] in ("export", "declare", "local") :]
        while words and (assigned := _ASSIGNMENT.fullmatch(words[0])) and not _is_setting(words[0]):
            before = variables.get(assigned[1], "") if assigned[2] else ""
            variables[assigned[1]] = before + _replaced(assigned[3], variables)
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


def _commands(text: str, path: str, arrays: dict[str, list[str]], variables: dict[str, str]) -> Iterator[list[str]]:
    """Yield the words of each command; the words of `NAME=(...)` go to the arrays instead."""
    text = re.sub(r"(^|\s)#[^\n]*", r"\1", text).replace("\\\n", " ")
    text = _ARITHMETIC.sub(lambda match: f"$[{''.join(match[1].split()).translate({40: 91, 41: 93})}]", text)
    parser = shlex.shlex(text, posix=True, punctuation_chars=_SIGNS)
    parser.whitespace, parser.whitespace_split, parser.commenters = " \t\r", True, ""
    command: list[str] = []
    array: list[str] | None = None
    try:
        for word in parser:
            is_sign = set(word) <= set(_SIGNS)
            if is_sign and array is not None:
                array = None if ")" in word else array
            elif array is not None:
                array += _expanded(word, arrays, variables)
            elif is_sign and word[0] == "(" and command and (found := re.fullmatch(r"(\w+)(\+?)=", command[-1])):
                array = arrays[found[1]] = [*arrays.get(found[1], ())] if found[2] else []
                command.pop()
            elif not is_sign:
                command.append(word)
            elif command:
                yield command
                command = []
    except ValueError as error:
        raise ConfigError("FILE", path, f"cannot be read ({error}).", "close its quotes.") from error
    if command:
        yield command


def _expanded(word: str, arrays: dict[str, list[str]], variables: dict[str, str]) -> list[str]:
    """Return the words that a word stands for: the words of an array or of a variable with flags, or one text."""
    if found := _ARRAY.fullmatch(word):
        if found[1] in arrays:
            return arrays[found[1]]
        if found[1] in "@*" or "[" in word:
            return []  # arguments of the script, and arrays of another file
        if (value := variables.get(found[1], "")).lstrip().startswith("--"):
            return shlex.split(value)
    return [_replaced(word, variables)]


def _replaced(word: str, variables: dict[str, str]) -> str:
    """Return a word with the variables that have a value, and with arithmetic of numbers computed."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[0] if match[2] is None else match[2])

    for _ in range(_MOST_NESTED):
        if (found := _VARIABLE.sub(value, word)) == word:
            break
        word = found
    return re.sub(r"\$\[(.*)\]", lambda match: _computed(match[1], variables, match[0]), word)


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
