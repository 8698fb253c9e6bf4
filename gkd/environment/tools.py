"""Plain functions as tools, which the student calls in the form of its chat template.

    class Calculator(ToolEnvironment):
        functions = (add, multiply)

A turn may have several calls. A mistake in a call is its result: the student reads it, and may try again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, get_type_hints

import msgspec

from gkd.environment.calls import NAMES, CallError, ToolCall, are_probe, parse_calls
from gkd.errors import EnvironmentError
from gkd.user_code import encodable, shown

_SECTION = re.compile(r"\n\s*(?:Args|Arguments|Returns|Raises|Yields|Example|Examples|Note):\s*\n")
_ARGUMENTS = re.compile(
    r"\n\s*(?:Args|Arguments):\s*\n(.*?)(?=\n\s*(?:Returns|Raises|Yields|Examples?|Note):|\Z)", re.DOTALL
)
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*?)(?=^\s*\w+\s*(?:\([^)]*\))?:|\Z)", re.DOTALL | re.MULTILINE)

_WORDS = {"True": "true", "False": "false", "None": "null"}  # as Qwen-Coder's template writes them


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a function in OpenAI's form: from its type hints, and its docstring in Google's style.

    Raises:
        TypeError: a parameter has no type hint, or one that JSON has no form for; Python has removed the docstring.
    """
    name = function.__name__
    doc = f"\n{inspect.getdoc(function) or ''}"
    if sys.flags.optimize >= 2 and not doc.strip():
        raise TypeError(f"tool {name}: its description is its docstring, which PYTHONOPTIMIZE=2 removes; unset it")
    section = _ARGUMENTS.search(doc)
    about = {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(section[1])} if section else {}
    properties: dict[str, Any] = {}
    required = []
    for parameter, hint in _hints(function).items():
        try:
            properties[parameter] = msgspec.json.schema(hint)
        except (TypeError, RuntimeError) as error:
            raise TypeError(f"tool {name}: parameter {parameter} has a type without a JSON form ({error})") from error
        if about.get(parameter):
            properties[parameter]["description"] = about[parameter]
        if inspect.signature(function).parameters[parameter].default is inspect.Parameter.empty:
            required.append(parameter)
    parameters = {"type": "object", "properties": properties, "required": required}
    description = _SECTION.split(doc, maxsplit=1)[0].strip()
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        has_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not has_name or parameter.name not in hints:
            raise TypeError(f"tool {function.__name__}: parameter {parameter.name} must have a name and a type hint")
    hints.pop("return", None)
    return hints


async def _answer(call: ToolCall | CallError, functions: Mapping[str, Callable[..., Any]]) -> str:
    """Make a call and return its result; what is wrong with it is the text."""
    try:
        return encodable(str(await _result(call, functions)))
    except CallError as error:
        return f"Error: {error}"


async def _result(call: ToolCall | CallError, functions: Mapping[str, Callable[..., Any]]) -> Any:
    if isinstance(call, CallError):
        raise call
    function = functions.get(call.name)
    if function is None:
        name = f"tool {shown(call.name)}" if call.name.isidentifier() else "such tool"
        raise CallError(f"there is no {name}. Tools are {', '.join(functions)}")
    try:
        inspect.signature(function).bind(**call.arguments)
        hints = _hints(function)
        arguments = {name: value_of(value, hints[name], call.is_text) for name, value in call.arguments.items()}
    except (TypeError, msgspec.ValidationError) as error:
        text = re.sub(r"('\w*')|'.*", lambda quoted: quoted[1] or "...", shown(error), flags=re.DOTALL)  # see CallError
        raise CallError(f"wrong arguments of {call.name}: {text}") from error
    try:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        return await asyncio.to_thread(function, **arguments)
    except Exception as error:  # a tool may raise any error; the student may try again
        raise CallError(f"{call.name} raised {type(error).__name__}: {shown(error)}") from error


def value_of(value: Any, hint: Any, is_text: bool) -> Any:
    """Return an argument of a ToolCall with the type of a hint. Raises msgspec.ValidationError: it has another one."""
    if is_text and hint is not str and value[:1] != '"':  # no form writes quotes around a text
        with suppress(ValueError, RecursionError):  # else text without quotes, for a hint such as Literal or str | None
            return msgspec.convert(json.loads(_WORDS.get(value, value)), hint)
    return msgspec.convert(value, hint)


class ToolEnvironment:
    """Environment of tools; a turn without a call ends the trajectory.

    A subclass names its functions; those without `async` run in a thread. Calls of a turn are made one after the other.
    """

    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    tools: ClassVar[Sequence[dict[str, Any]]] = ()
    parse = staticmethod(parse_calls)  # a subclass may read another form
    _json_is_call: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "functions" in cls.__dict__:
            cls.tools = [schema(function) for function in cls.functions]

    @classmethod
    def learn_form(cls, written: Sequence[str]) -> None:
        """Learn from the chat template's own calls, see `written_calls`, whether JSON alone is a call of any tool.

        Raises:
            EnvironmentError: `parse` does not read them.
        """
        try:
            reads = [any(are_probe(cls.parse(turn, names), turn) for turn in written) for names in ((), None)]
        except Exception as error:  # a user's `parse` may raise any error
            problem = f"{cls.__name__}.parse raised {type(error).__name__}: {shown(error)}. Fix: correct it"
            raise EnvironmentError(problem) from error
        cls._json_is_call = reads == [False, True]
        if written and not any(reads):
            problem = f"the chat template writes calls as {shown(written[0])}, which the environment does not read"
            fix = "use a model that writes one of these forms, or give the class a function `parse` that reads this one"
            raise EnvironmentError(f"{problem}. It reads the forms of {NAMES}. Fix: {fix}")

    def __init__(self, row: dict[str, Any], seed: int) -> None:
        self.row = row
        self.seed = seed

    async def step(self, text: str) -> list[dict[str, str]] | None:
        """Answer each call of a turn with a message."""
        functions = self.callables()
        calls = self.parse(text, None if self._json_is_call else functions)
        return [{"role": "tool", "content": await _answer(call, functions)} for call in calls] or None

    def callables(self) -> dict[str, Callable[..., Any]]:
        """Return the functions of this trajectory by name."""
        return {function.__name__: function for function in self.functions}
