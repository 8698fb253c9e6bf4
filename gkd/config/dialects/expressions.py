"""Evaluate the expressions of a dialect file: what a value of another system is here.

An expression is Python with the functions below and no others. The files are part of this package; no text of a user
is ever evaluated.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

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
        return Path(file).read_text()
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
