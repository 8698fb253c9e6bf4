"""Worker process that calls the functions: `python -m gkd.scoring.reward.worker FD FD`, started by `RewardWorkers`.

The first FD is a socket to the parent, the second one the memory of `Progress`. Messages are pickled: the parent sends
one `Start`, then lists of `Request`s. The worker replies to Start with the text of an error, or an empty one, and to a
list with what `judged` returns. It ends with its parent, also if that is killed, and ignores Ctrl-C, after which the
parent ends it.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from gkd.config.schema import Config
from gkd.config.schema_sections import ENVIRONMENT, EXACT_MATCH, LENGTH, MATH_VERIFY
from gkd.data.answers import is_correct
from gkd.data.conversation import reference_text
from gkd.data.row_files import decode_row
from gkd.errors import GkdError, RewardError
from gkd.user_code import Progress, blame, end_with_parent, finite_number, import_function, own_traceback

# The functions that judge responses: this package's, and a user's own by its path.

# Parameters of functions of other frameworks, which get other arguments, or a whole batch.
_OTHER_FORMS = {"solution_str": "verl", "ground_truth": "verl", "prompts": "TRL", "completions": "TRL"}
_ARGUMENTS = ("prompt", "response", "row")
_MATH_S = 2  # limit of math_verify for parsing an answer, and for a comparison
# What a reference answer has that is not a formula alone: words, a unit, marks of its own. Outside of $...$ math_verify
# finds the 2 in a formula such as 2\sqrt{3}.
_IN_TEXT = re.compile(r"[$#\n]|\\boxed|\\[(\[]|[^\x00-\x7f]|(?<![\\A-Za-z])[A-Za-z]{3,}|^\s*\S*\d\s+[A-Za-z.]+\s*$")
_EXPONENT = re.compile(r"[-+]?\d+(\.\d+)?[eE][-+]?\d{1,3}")  # as Python writes small and large numbers
_NAMES = re.compile(r"\\(?:begin|end|text\w*|mbox|math\w+)\s*\{[^{}]*\}")  # words in a formula


@dataclass(frozen=True, slots=True)
class Case:
    """Hold a response to judge."""

    prompt: str  # text that the student read, without special tokens
    response: str  # without special tokens; of a trajectory the last turn
    row: dict[str, Any]  # all columns of the prompt's row
    n_tokens: int  # the student's own tokens of the response
    truncated: bool  # it reached data.max_response_length
    messages: list[dict[str, str]] | None = None  # turns and observations; None without an environment
    reward: float | None = None  # the environment's; NaN: it failed


Judge = Callable[[Case], float]


class Undecided(Exception):
    """A value is unknown: `reward/undecided` counts it.

    Args:
        reason: one of `UNKNOWN`, which travels as its number.
    """


LATE, CUT, FAILED = "math_verify reached its time limit", "the first turn was cut off", "the environment failed"
UNKNOWN = {LATE: math.nan, CUT: math.inf, FAILED: -math.inf}  # all other values are finite


def judge_of(path: str, config: Config) -> Judge:
    """Return the function of an entry of `reward.functions`, or of `eval.metric`.

    Raises:
        RewardError: its module cannot be imported, or has no such function; or it has another form.
    """
    if path == EXACT_MATCH:
        marker = config.eval.answer_marker
        return lambda case: float(not case.truncated and is_correct(case.response, _answer(case, config), marker))
    if path == MATH_VERIFY:
        return _math_verify(config)
    if path == ENVIRONMENT:
        return _environment_reward
    if path == LENGTH:
        return lambda case: case.n_tokens / config.data.max_response_length
    try:
        function = import_function(path)
    except ImportError as error:
        raise RewardError(str(error)) from error
    if problem := _problem_of(function):
        raise RewardError(f"{path}: {problem}; write a function of (prompt, response, row) that calls it")
    if takes_messages(function):
        return lambda case: function(case.prompt, case.response, case.row, messages=case.messages)
    return lambda case: function(case.prompt, case.response, case.row)


def _problem_of(function: Callable[..., Any]) -> str:
    """Return why a function cannot judge a response when it is called with `_ARGUMENTS`; empty if it can."""
    names = list(_signature(function).parameters)
    if others := [name for name in names[:3] if name in _OTHER_FORMS]:
        return f"its parameter {others[0]} is that of {_OTHER_FORMS[others[0]]}'s form"
    if any(name in names[:3] and names.index(name) != place for place, name in enumerate(_ARGUMENTS)):
        return f"its parameters are {', '.join(names)}, in another order"
    kinds = inspect.isclass, inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(is_other(each) for is_other in kinds for each in (function, type(function).__call__)):
        return "it is a class, or is async or a generator, and returns no number"
    try:
        _signature(function).bind(*_ARGUMENTS, **({"messages": None} if takes_messages(function) else {}))
    except TypeError as error:
        return f"it cannot be called with three arguments ({error})"
    return ""


def takes_messages(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter `messages`: it judges a trajectory, not only its last turn."""
    return "messages" in _signature(function).parameters


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some functions of C have none
        return inspect.signature(lambda *_: None)


def _environment_reward(case: Case) -> float:
    if case.reward is None and not case.truncated:
        raise ValueError("the class of rollout.environment has no attribute `reward`")
    if case.reward is None:
        raise Undecided(CUT)
    if math.isnan(case.reward):
        raise Undecided(FAILED)
    return case.reward


def _answer(case: Case, config: Config) -> str:
    found = case.row.get(config.data.answer_key)
    answer = reference_text(found)
    if answer is None:
        raise ValueError(f"the row has {found!r} as {config.data.answer_key!r} (data.answer_key), no text or number")
    return answer


def _math_verify(config: Config) -> Judge:
    """Return the comparison of mathematical answers of the package math-verify.

    A response that it cannot parse counts as wrong. What it cannot parse or compare in 2 s raises Undecided. A
    reference answer that it cannot parse, and an error of a comparison, are errors.
    """
    try:
        from math_verify import parse, verify
        from math_verify.errors import TimeoutException
    except ImportError as error:
        raise RewardError(f"{MATH_VERIFY}: needs the extra math of this package ({error})") from error

    def parsed(text: str) -> list[Any]:
        """Return what it finds in a text; nothing if the text cannot be parsed, as a digit of another script."""
        try:
            found: list[Any] = parse(text, parsing_timeout=_MATH_S, raise_on_error=True)
        except TimeoutException as error:
            raise Undecided(LATE) from error
        except Exception:  # the package names no exceptions
            return []
        return found

    def judge(case: Case) -> float:
        answer = _answer(case, config)
        if _EXPONENT.fullmatch(answer):  # it would find the 1 in 1e-05
            answer = f"{Decimal(answer):f}"
        forms = (answer, f"${answer}$") if _IN_TEXT.search(_NAMES.sub("", answer)) else (f"${answer}$", answer)
        expected = parsed(forms[0])
        if len(expected) < 2:  # nothing, or the text alone
            expected = parsed(forms[1]) or expected
        if not expected:
            raise ValueError(f"math_verify cannot parse the reference answer {answer!r}")
        if case.truncated:
            return 0.0
        found = parsed(case.response)
        try:
            return float(verify(expected, found, timeout_seconds=_MATH_S, raise_on_error=True))
        except TimeoutException as error:
            raise Undecided(LATE) from error

    return judge


@dataclass(frozen=True, slots=True)
class Start:
    """Hold what a worker needs.

    Args:
        paths: of the functions.
        search_path: folders in which the driver finds modules.
    """

    config: Config
    paths: tuple[str, ...]
    search_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """Hold a response to judge with some of the functions; see `Case`."""

    prompt: str
    response: str
    n_tokens: int
    truncated: bool
    row: bytes  # see `gkd.data.row_files`
    functions: tuple[int, ...]  # positions in `Start.paths`
    messages: bytes | None = None  # see `gkd.types.Rollout`
    reward: float | None = None


def main(fd: int, progress_fd: int) -> None:
    """Serve requests until the parent closes the socket."""
    end_with_parent(fd)
    parent, progress = Connection(fd), Progress(progress_fd)
    start: Start = parent.recv()
    sys.path[:0] = [folder for folder in start.search_path if folder not in sys.path]
    try:
        judges = [judge_of(path, start.config) for path in start.paths]
    except GkdError as error:
        parent.send(str(error))
        return
    parent.send("")
    while True:
        parent.send(judged(parent.recv(), judges, progress.begin))


def judged(
    requests: Sequence[Request], judges: Sequence[Judge], begin: Callable[[int], None]
) -> tuple[list[float], str]:
    """Return a number for each request and each of its functions, and what is wrong with the next; "": nothing.

    Numbers are finite, or stand for Undecided, see `UNKNOWN`. What is wrong is one line, and behind it the traceback.

    Args:
        begin: called before each call, with its place.
    """
    numbers: list[float] = []
    for request in requests:
        for index in request.functions:
            _, row = decode_row(request.row)  # for each: a function may change what is in a column
            messages = None if request.messages is None else msgspec.json.decode(request.messages)
            case = Case(
                request.prompt, request.response, row, request.n_tokens, request.truncated, messages, request.reward
            )
            begin(len(numbers))
            value = _call(judges[index], case)
            if isinstance(value, str):
                return numbers, value
            numbers.append(value)
    return numbers, ""


def _call(judge: Judge, case: Case) -> float | str:
    try:
        value = judge(case)
    except Undecided as undecided:
        return UNKNOWN[str(undecided)]
    except BaseException as error:  # SystemExit is caught, too: it is the function's own
        text = f"raised {type(error).__name__}: {error}{blame(error, case.row)}".replace("\n", " ")
        return f"{text}\n{own_traceback(error)}"
    number = finite_number(value)
    return f"returned {number}" if isinstance(number, str) else number


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
