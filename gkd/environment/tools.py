"""Plain functions as tools, and the two common ways in which models write calls of tools as text.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

import msgspec

from gkd.environment.form import encodable, shown

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)|(<function=.*?(?:</function>|\Z))", re.DOTALL)
_SECTION = re.compile(r"\n\s*(?:Args|Arguments|Returns|Raises|Yields|Example|Examples|Note):\s*\n")
_ARGUMENTS = re.compile(
    r"\n\s*(?:Args|Arguments):\s*\n(.*?)(?=\n\s*(?:Returns|Raises|Yields|Examples?|Note):|\Z)", re.DOTALL
)
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*?)(?=^\s*\w+\s*(?:\([^)]*\))?:|\Z)", re.DOTALL | re.MULTILINE)


class CallError(Exception):
    """A call cannot be made; the student reads the text."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Hold a call that the student wrote.

    Args:
        is_text: the values of `arguments` are text as the student wrote it, not JSON.
    """

    name: str
    arguments: dict[str, Any]
    is_text: bool = False


def parse_calls(text: str) -> list[ToolCall | CallError]:
    """Return the calls in a turn in their order, and a CallError for each that has another form than these:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>
    <function=add><parameter=a>1</parameter><parameter=b>2</parameter></function>, also within <tool_call>

    The end of the turn also ends a call. What the student only thinks, until the last </think> and behind a <think>
    that it does not end, does not count.
    """
    said = text.rpartition("</think>")[2].partition("<think>")[0]
    return [_parsed(json_form or tagged) for json_form, tagged in _CALL.findall(said)]


def _parsed(text: str) -> ToolCall | CallError:
    text = text.strip()
    if text.startswith("<function="):
        name, _, body = text.removeprefix("<function=").partition("</function>")[0].partition(">")
        if not body.strip().startswith("{"):
            # No regular expression: it would take minutes for a student that repeats the opening tag.
            pairs = [part.partition("</parameter>")[0].partition(">") for part in body.split("<parameter=")[1:]]
            values = {key: value.removeprefix("\n").removesuffix("\n") for key, _, value in pairs}
            return ToolCall(name, values, is_text=True)
        text = f'{{"name": {json.dumps(name)}, "arguments": {body}}}'
    try:
        call = json.loads(text)
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):  # some models write them as JSON within JSON
            arguments = json.loads(arguments)
        if isinstance(call["name"], str) and isinstance(arguments, dict):
            return ToolCall(call["name"], arguments)
    except (ValueError, AttributeError, KeyError, RecursionError) as error:
        # No part of the call: a student that writes a marker of the template in it would end its trajectory.
        where = f" ({error})" if isinstance(error, json.JSONDecodeError) else ""
        return CallError(f'the call is no JSON object with "name" and "arguments"{where}')
    return CallError('"name" must be text, and "arguments" an object')


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a function in OpenAI's form: from its type hints, and its docstring in Google's style.

    Raises:
        TypeError: a parameter has no type hint, or one that JSON has no form for; Python has removed the docstring.
    """
    name, doc = function.__name__, f"\n{inspect.getdoc(function) or ''}"
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
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name not in hints:
            raise TypeError(f"tool {function.__name__}: parameter {parameter.name} must have a name and a type hint")
    hints.pop("return", None)
    return hints


async def answer(calls: Iterable[ToolCall | CallError], functions: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Make calls one after the other, and return a text for each; what is wrong with one is its text."""
    texts = []
    for call in calls:
        try:
            texts.append(encodable(str(await _result(call, functions))))
        except CallError as error:
            texts.append(f"Error: {error}")
    return texts


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
        raise CallError(f"wrong arguments of {call.name}: {shown(error)}") from error
    try:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        return await asyncio.to_thread(function, **arguments)
    except Exception as error:  # a tool may raise any error; the student may try again
        raise CallError(f"{call.name} raised {type(error).__name__}: {shown(error)}") from error


def value_of(value: Any, hint: Any, is_text: bool) -> Any:
    """Return an argument with the type of a hint. Raises msgspec.ValidationError: it has another one.

    Args:
        is_text: see `ToolCall`.
    """
    if is_text and hint is not str:
        try:
            value = json.loads(value)
        except ValueError:  # text without quotes, for a hint such as Literal or str | None
            return msgspec.convert(value, hint)
    return msgspec.convert(value, hint)


class ToolEnvironment:
    """Environment of tools; a turn without a call ends the trajectory.

    A subclass names its functions; those without `async` run in a thread. Calls of a turn are made one after the other.
    """

    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    tools: ClassVar[Sequence[dict[str, Any]]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "functions" in cls.__dict__:
            cls.tools = [schema(function) for function in cls.functions]

    def __init__(self, row: dict[str, Any], seed: int) -> None:
        self.row, self.seed = row, seed

    async def step(self, text: str) -> list[dict[str, str]] | None:
        """Answer each call of a turn with a message."""
        calls = parse_calls(text)
        if not calls:
            return None
        return [{"role": "tool", "content": content} for content in await answer(calls, self.callables())]

    def callables(self) -> dict[str, Callable[..., Any]]:
        """Return the functions of this trajectory by name."""
        return {function.__name__: function for function in self.functions}
