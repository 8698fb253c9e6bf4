"""Read the dialect files: `Row` describes one setting of another system, `Dialect` all of them.

CONTRIBUTING.md describes the format of the files.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import CodeType
from typing import Any, Literal, NoReturn, get_args

Kind = Literal["mapped", "refused", "unsupported", "default", "meaningless"]
UNSET: Any = object()  # a row without a default
_FOLDER = Path(__file__).parent
_COMMON = "common"  # tables and abbreviations of all files, and names that people write here


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting of another system.

    Args:
        names: its names, dotted or as a flag. `*` stands for any text.
        kind: mapped; refused (not done here, and it decides what is trained); unsupported (not done here); default
            (what this system does without a key); meaningless.
        note: the remark of reports, hints and pages.
        key: the keys here, separated by spaces; keys of `set` and `choices` need not be named.
        default: what the other system uses if the name is not set, where that differs from the default here.
        harmless: values of a refused or unsupported setting which have no effect.
        when: expression; false: there is nothing to set.
        value: expression for the only key.
        set: key -> literal, or an expression after "= ".
        choices: old value -> value of the only key, or a table of keys; the name of a table of common.toml.
        otherwise: why a value that `choices` does not have is refused.
        refuse: expression -> why the value is refused if it is true.
        used_by: the row that uses the value; this one sets nothing.
        servers: expression for the commands that start the teachers.
    """

    names: tuple[str, ...]
    kind: Kind
    note: str = ""
    key: str = ""
    default: Any = UNSET
    harmless: tuple[Any, ...] = ()
    when: str = "True"
    value: str = "value"
    set: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, Any] | None = None
    otherwise: str = ""
    refuse: Mapping[str, str] = field(default_factory=dict)
    used_by: str = ""
    servers: str = ""

    @property
    def keys(self) -> list[str]:
        """Return the keys here that the row can set."""
        chosen = [each for each in (self.choices or {}).values() if isinstance(each, Mapping)]
        return list(dict.fromkeys([*self.key.split(), *self.set, *itertools.chain(*chosen)]))

    def names_of(self, name: str) -> Sequence[str]:
        """Return the names of one setting: all names of a mapped row, else names with other roles before the dot."""
        if self.kind == "mapped":
            return self.names
        _, _, setting = name.partition(".")
        return [each for each in self.names if setting and each.partition(".")[2] == setting]

    def settings(self, value: Any, old: OldSettings) -> dict[str, Any]:
        """Return the settings here of a value. Raises NotConvertible."""
        names = {"value": value, "old": old, "has": old.has, "tree": old.tree}
        if self.used_by or not evaluate(self.when, names):
            return {}
        for condition, reason in self.refuse.items():
            if evaluate(condition, names):
                raise NotConvertible(reason)
        found: Mapping[str, Any] = self.set or {self.keys[0]: f"= {self.value}"}
        if self.choices is not None:
            name = str(value).lower()
            if name not in self.choices:
                raise NotConvertible(self.otherwise)
            chosen = self.choices[name]
            found = {**self.set, **(chosen if isinstance(chosen, Mapping) else {self.keys[0]: chosen})}
        results = {key: _result(each, names) for key, each in found.items()}
        return {key: each for key, each in results.items() if each is not None}

    def commands(self, value: Any, old: OldSettings) -> list[str]:
        """Return the commands that start the teachers."""
        names = {"value": value, "old": old, "has": old.has, "tree": old.tree}
        return list(evaluate(self.servers, names)) if self.servers else []


class OldSettings:
    """The settings of an old file, with the other system's defaults, for conversions that need several of them."""

    def __init__(self, values: Mapping[str, Any], dialect: Dialect) -> None:
        self._values, self._dialect = {plain(name): value for name, value in values.items()}, dialect

    def __call__(self, name: str, otherwise: Any = None) -> Any:
        """Return the value of a setting by one of its names, else the other system's default, else `otherwise`."""
        row = self._dialect.find(name)
        for each in (name, *(row.names_of(name) if row else ())):
            if self._values.get(plain(each)) is not None:
                return self._values[plain(each)]
        return otherwise if row is None or row.default is UNSET else row.default

    def has(self, pattern: str) -> bool:
        """Return whether a setting with such a name is set; `*` stands for any text."""
        return any(fnmatchcase(name, plain(pattern)) for name, value in self._values.items() if value is not None)

    def tree(self, prefix: str) -> dict[str, Any]:
        """Return the settings below a dotted prefix as nested dicts."""
        found: dict[str, Any] = {}
        for name, value in self._values.items():
            if name.startswith(f"{plain(prefix)}."):
                *parents, last = name.removeprefix(f"{plain(prefix)}.").split(".")
                node = found
                for parent in parents:
                    node[parent] = node[parent] if isinstance(node.get(parent), dict) else {}  # None, and keys below
                    node = node[parent]
                node[last] = value
        return found


@dataclass(frozen=True)
class Dialect:
    """All settings that one way of writing another system's configs has."""

    name: str  # name of its file, and on the command line
    title: str  # name in texts
    system: str  # name of its page, docs/from_SYSTEM.md
    own: tuple[Row, ...]  # rows of its own file
    rows: tuple[Row, ...]  # rows of its file and of the files that it extends, without names of an earlier file
    extends: tuple[str, ...] = ()  # names of these files
    programs: tuple[str, ...] = ()  # patterns of a command's words
    detect: tuple[str, ...] = ()  # patterns of settings that no other dialect has

    def find(self, name: str) -> Row | None:
        """Return the row of a name: an exact one, else the row of the longest pattern, else one with any beginning."""
        if row := self._exact.get(plain(name)):
            return row
        return next((row for pattern, row in self._patterns if fnmatchcase(plain(name), pattern)), None)

    def knows(self, name: str) -> bool:
        """Return whether a row has exactly this name."""
        return plain(name) in self._exact

    @functools.cached_property
    def _exact(self) -> dict[str, Row]:
        return {plain(name): row for row in self.rows for name in row.names if "*" not in name}

    @functools.cached_property
    def _patterns(self) -> list[tuple[str, Row]]:
        found = [(plain(name), row) for row in self.rows for name in row.names if "*" in name]
        return sorted(found, key=lambda each: (each[0].startswith("*"), -len(each[0].replace("*", ""))))

    @functools.cached_property
    def words(self) -> list[tuple[Row, list[str]]]:
        """Return each name of the own rows as its words, without the `*.` that stands for any role, with its row."""
        return [(row, plain(name).removeprefix("*.").split(".")) for row in self.own for name in row.names]


@functools.cache
def files() -> dict[str, Dialect]:
    """Return the content of each file by its name, also of the files that others extend."""
    return {path.stem: read(path.stem) for path in sorted(_FOLDER.glob("*.toml"))}


@functools.cache
def dialects() -> dict[str, Dialect]:
    """Return the dialects that a file of another system can have."""
    return {name: each for name, each in files().items() if each.programs or each.detect}


def _result(each: Any, names: Mapping[str, Any]) -> Any:
    return evaluate(each[2:], names) if isinstance(each, str) and each.startswith("= ") else each


def plain(name: str) -> str:
    """Return a name without the signs of flags and of Hydra's overrides: `--save-interval` -> `save_interval`."""
    return name.lstrip("-+~").replace("-", "_")


@functools.cache
def _toml(name: str) -> dict[str, Any]:
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


@functools.cache
def read(name: str) -> Dialect:
    """Return the content of one file, with the rows of the files that it extends."""
    content = _toml(name)
    own = tuple(_rows(name))
    bases = [read(base) for base in content.get("extends", ())]
    taken = {plain(each) for row in own for each in row.names}
    inherited = []
    for row in (row for base in bases for row in base.rows):
        if left := tuple(each for each in row.names if plain(each) not in taken):
            inherited.append(replace(row, names=left))
            taken.update(map(plain, left))
    texts = (tuple(content.get(each, ())) for each in ("extends", "programs", "detect"))
    return Dialect(name, content["title"], content["system"], own, (*own, *inherited), *texts)


def _rows(name: str) -> Iterator[Row]:
    """Yield the rows of a file, with its abbreviations replaced."""
    content = _toml(name)
    words = _toml(_COMMON)["words"] | content.get("words", {})
    for kind in get_args(Kind):
        for names, entry in content.get(kind, {}).items():
            given = {"names": names} | (entry if isinstance(entry, dict) else {"note": entry})
            fields = {field: each if field == "names" else _filled(each, words) for field, each in given.items()}
            if isinstance(table := fields.get("choices"), str):
                fields["choices"] = _toml(_COMMON)["tables"][table]
            fields["harmless"] = tuple(fields.get("harmless", ()))
            listed = fields.pop("names").split()
            yield Row(names=tuple(itertools.chain(*(_each(name, words) for name in listed))), kind=kind, **fields)


def _filled(value: Any, words: Mapping[str, Any]) -> Any:
    """Return a value with the first meaning of each abbreviation in its texts."""
    if isinstance(value, dict):
        return {_filled(key, words): _filled(each, words) for key, each in value.items()}
    return next(_each(value, words)) if isinstance(value, str) else value


def _each(text: str, words: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text with each meaning of the abbreviations `{A}` in it."""
    found = next((match for match in re.finditer(r"\{(\w+)\}", text) if match[1] in words), None)
    if found is None:
        yield text
        return
    meanings = words[found[1]]
    for meaning in [meanings] if isinstance(meanings, str) else meanings:
        yield from _each(text[: found.start()] + meaning + text[found.end() :], words)


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")  # names in trainer.loggers
_NO_TRACKERS = ("console", "stdout", "file", "none")  # metrics.jsonl and the log are always written


class NotConvertible(Exception):
    """A value has no counterpart that can be computed; the message is what to do instead."""


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression; `names` are its variables. Raises NotConvertible."""
    return eval(compiled(text), {"__builtins__": {}} | _FUNCTIONS | dict(names))


@functools.cache
def compiled(text: str) -> CodeType:
    """Return an expression as code. Raises SyntaxError."""
    return compile(f"({text}\n)", f"<{text}>", "eval")


def as_list(value: Any) -> list[Any]:
    """Return a list: the value if it is one, the parts of `a,b`, else a list of the one value."""
    if isinstance(value, str):
        return [part.strip() for part in value.strip("[]").split(",") if part.strip()]
    return list(value) if isinstance(value, Iterable) else [value]


def stop(reason: str) -> NoReturn:
    """Raise NotConvertible."""
    raise NotConvertible(reason)


def ratio(part: Any, whole: Any) -> float:
    """Return a quotient with the digits that a person would write."""
    return float(f"{float(part) / float(whole):.9g}")


def share(part: Any, total_steps: Any, key: str) -> int:
    """Return a share of the run in steps. Raises NotConvertible if the number of steps is not in the old file."""
    if not float(part or 0):
        return 0
    if not total_steps or int(total_steps) <= 0:
        stop(f"set {key} to {float(part):g} x the number of steps, which follows from the data.")
    return math.ceil(float(part) * int(total_steps))


def gpus(text: Any) -> list[int]:
    """Return the GPU numbers of a list, or of a text like `list(range(0, 8)) + [9]`. Raises NotConvertible."""
    if not isinstance(text, str):
        return sorted({int(gpu) for gpu in text})
    found: set[int] = set()
    for part in text.split("+"):
        if bounds := re.fullmatch(r"\s*list\(range\(([\d\s,]+)\)\)\s*", part):
            found.update(range(*(int(number) for number in bounds[1].split(","))))
        elif re.fullmatch(r"\s*\[[\d\s,]*\]\s*", part):
            found.update(map(int, re.findall(r"\d+", part)))
        else:
            stop("the list of GPUs cannot be read; set the sizes of the pools.")
    return sorted(found)


def trackers(value: Any) -> list[str]:
    """Return trainer.loggers. Raises NotConvertible if it does not have one of the trackers."""
    names = [str(name) for name in as_list(value) if name and name not in _NO_TRACKERS]
    if unknown := sorted(set(names) - set(TRACKERS)):
        stop(f"trainer.loggers has {', '.join(TRACKERS)}, not {', '.join(unknown)}.")
    return names


def content(file: Any) -> str:
    """Return the text of a file. Raises NotConvertible if it cannot be read here."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        stop(f"copy the text of the file into data.system_prompt: {file} cannot be read here ({error.strerror}).")


def route_name(text: Any) -> str:
    """Return a text as a name in teacher.routes: letters, digits, _ and -. Raises NotConvertible."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", str(text)):
        stop(f"{text!r} is no name of teacher.routes: rename it in the data, to letters, digits, _ and -.")
    return str(text)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        *(all, any, bool, dict, enumerate, float, int, isinstance, len, list, max, min, range, round, set, sorted, str),
        *(sum, zip, as_list, content, gpus, math.ceil, ratio, route_name, share, stop, trackers),
    )
}
