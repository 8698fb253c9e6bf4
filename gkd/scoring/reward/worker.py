"""The functions that judge responses, and the process that calls them, which `gkd.hosts.Host` starts.

The parent sends one `Start`, then lists of `Case`s or `Group`s. The worker answers each call of a function with a
`Value`, which tells the parent that the next call begins.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Any

import msgspec

from gkd.config.schema import Config
from gkd.config.schema_sections import ENVIRONMENT, EXACT_MATCH, LENGTH, MATH_VERIFY
from gkd.config.schema_teacher import SOLVED_SIBLING
from gkd.data.answers import is_correct
from gkd.data.conversation import reference_text
from gkd.data.row_files import decode_row
from gkd.errors import RewardError
from gkd.hosts import Parent, Ready
from gkd.scoring.reward.groups import Group, checked_result, solved_sibling
from gkd.user_code import blame, encodable, finite_number, import_function, shown, traceback_of_user

# Parameters of functions of other frameworks, which get other arguments, or a whole batch.
_OTHER_FORMS = {"solution_str": "verl", "ground_truth": "verl", "prompts": "TRL", "completions": "TRL"}
_ARGUMENTS = ("prompt", "response", "row")
_LONGEST_ERROR = 2000  # characters of the text of an error
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
    encoded_row: bytes  # see `gkd.data.row_files`
    n_tokens: int  # the student's own tokens of the response
    truncated: bool  # it reached data.max_response_length
    encoded_messages: bytes | None = None  # see `gkd.types.Rollout`
    reward: float | None = None  # the environment's; NaN: it failed

    @property
    def row(self) -> dict[str, Any]:
        """All columns of the prompt's row. Each caller gets its own: a function may change what is in a column."""
        return decode_row(self.encoded_row)[1]

    @property
    def messages(self) -> list[dict[str, str]] | None:
        """Turns and observations, also for each caller; None without an environment."""
        return None if self.encoded_messages is None else msgspec.json.decode(self.encoded_messages)


Judge = Callable[[Any], Any]  # of a case -> number, or of a group


class Undecided(Exception):
    """A value is unknown, for a reason of `UNKNOWN`, which travels as its number: `reward/undecided` counts it."""


LATE = "math_verify reached its time limit"
CUT = "the first turn was cut off"
FAILED = "the environment failed"
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
    function = _imported(path, _ARGUMENTS)
    if takes_messages(function):
        return lambda case: function(case.prompt, case.response, case.row, messages=case.messages)
    return lambda case: function(case.prompt, case.response, case.row)


def group_judge_of(key: str, path: str) -> Judge:
    """Return the function of a key that gets a group, with `checked_result`. Raises RewardError as `judge_of`."""
    function = solved_sibling if path == SOLVED_SIBLING else _imported(path, ("group",))
    return lambda group: checked_result(key, len(group.responses), function(group))


def _imported(path: str, arguments: Sequence[str]) -> Callable[..., Any]:
    try:
        function = import_function(path)
    except ImportError as error:
        raise RewardError(str(error)) from error
    if problem := _problem_of(function, arguments):
        raise RewardError(f"{path}: {problem}; write a function of ({', '.join(arguments)}) that calls it")
    return function


def _problem_of(function: Callable[..., Any], arguments: Sequence[str]) -> str:
    """Return why a function cannot judge when it is called with these arguments; empty if it can."""
    names = list(_signature(function).parameters)
    if foreign := [name for name in names[:3] if name in _OTHER_FORMS]:
        return f"its parameter {foreign[0]} is that of {_OTHER_FORMS[foreign[0]]}'s form"
    if any(name in names[:3] and names.index(name) != place for place, name in enumerate(arguments)):
        return f"its parameters are {', '.join(names)}, in another order"
    kinds = inspect.isclass, inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(is_kind(target) for is_kind in kinds for target in (function, type(function).__call__)):
        return "it is a class, or is async or a generator, and returns no value"
    try:
        _signature(function).bind(*arguments, **({"messages": None} if takes_messages(function) else {}))
    except TypeError as error:
        return f"it cannot be called with {len(arguments)} arguments ({error})"
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
    value = case.row.get(config.data.answer_key)
    answer = reference_text(value)
    if answer is None:
        raise ValueError(f"the row has {value!r} as {config.data.answer_key!r} (data.answer_key), no text or number")
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
            return list(parse(text, parsing_timeout=_MATH_S, raise_on_error=True))
        except TimeoutException as error:
            raise Undecided(LATE) from error
        except Exception:  # the package names no exceptions
            return []

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
        parsed_answer = parsed(case.response)
        try:
            return float(verify(expected, parsed_answer, timeout_seconds=_MATH_S, raise_on_error=True))
        except TimeoutException as error:
            raise Undecided(LATE) from error

    return judge


@dataclass(frozen=True, slots=True)
class Start:
    """Hold what a worker needs.

    Args:
        search_path: folders in which the driver finds modules.
        groups: key and path of the functions that get groups; their positions follow those of `paths`.
    """

    config: Config
    paths: tuple[str, ...]
    search_path: tuple[str, ...]
    groups: tuple[tuple[str, str], ...] = ()


class Value(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Answer a call: a finite number, or one that stands for Undecided, see `UNKNOWN`.

    Args:
        result: in place of the number, a value for each response of a group.
        problem: what is wrong with the call, one line; there are no further answers.
        trace: the traceback of the function.
    """

    number: float = 0.0
    result: list[Any] = []
    problem: str = ""
    trace: str = ""


def judged(cases: Sequence[Case | Group], judges: Sequence[Judge]) -> Iterator[Value]:
    """Call each function for the first case, then for the next one, and yield the values."""
    for case, judge in product(cases, judges):
        value = _call(judge, case)
        yield value
        if value.problem:
            return


def _call(judge: Judge, case: Case | Group) -> Value:
    try:
        number = judge(case) if isinstance(case, Group) else finite_number(judge(case))
    except Undecided as undecided:
        return Value(UNKNOWN[str(undecided)])
    except BaseException as error:  # SystemExit is caught, too: it is the function's own
        text = f"raised {type(error).__name__}: {shown(error, _LONGEST_ERROR)}{blame(error, case.row)}"
        return Value(problem=encodable(text.replace("\n", " ")), trace=traceback_of_user(error))
    if isinstance(number, list):
        return Value(result=number)
    return Value(problem=f"returned {number}") if isinstance(number, str) else Value(number)


def main() -> None:
    """Serve functions, by their positions in `Start`, and cases or groups, until the parent ends this process."""
    parent = Parent()
    start: Start = parent.receive()
    judges = parent.load(
        start.search_path,
        lambda: [
            *(judge_of(path, start.config) for path in start.paths),
            *(group_judge_of(*own) for own in start.groups),
        ],
    )
    parent.send(Ready())
    while (message := parent.receive()) is not None:
        functions, cases = message
        for value in judged(cases, [judges[index] for index in functions]):
            parent.send(value)


if __name__ == "__main__":
    main()
