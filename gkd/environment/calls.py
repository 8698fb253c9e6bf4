"""Calls of tools in the forms in which models write them: one table, and what a chat template writes.

docs/development/design-decisions.md tells why this does not use vLLM's parsers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from os.path import commonprefix
from typing import Any

from gkd.data.template import QUESTION, START, ChatTemplate, TemplateFailed

NAMES = "Hermes, Qwen-Coder, GLM-4.5, Llama 3.1, Mistral, DeepSeek and Harmony"  # of the forms

# Form -> its mark, with the name of the tool if that stands in front of the arguments. No pattern backtracks far, and
# no end is looked for twice: a student may repeat a tag 10,000 times.
_FORMS = {
    "block": r"<tool_call>\s*(?:(?P<block_name>[A-Za-z_][\w.-]*)\s*(?=<arg_key>|</tool_call>|\Z))?",
    "function": r"(?=<function=)",
    "mistral": r"\[TOOL_CALLS\]\s*(?:(?P<mistral_name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]]*)?(?:\[ARGS\])?\s*)?",
    # Version 3 writes a type in front of the name, and a fence around the arguments; 3.1 neither.
    "deepseek": r"<｜tool▁calls?▁begin｜>\s*(?:<｜tool▁call▁begin｜>)?(?:(?:[^<\n]*<｜tool▁sep｜>(?!\s*\{))?"
    r"(?P<deepseek_name>[^<\n{]+)(?:<｜tool▁sep｜>|\n```(?:json)?)\s*)?",
    "harmony": r"(?:\A\s*(?=to=functions)|<\|start\|>assistant\s*|<\|channel\|>\w+\s*)to=(?:functions\.)?"
    r"(?:(?P<harmony_name>[\w.-]+)(?:\s*<\|(?:channel|constrain)\|>\s*\w+|\s+\w+){0,4}\s*<\|message\|>\s*)?",
    "llama": r"<\|(?:python_tag|tool_call(?:_start)?)\|>\s*",
    # Llama's form without its mark: at the beginning of a line, or behind a marker
    "alone": r"(?:(?m:^)|(?<=[>\]]))[ \t]*(?=(?:\[\s*)?\{\s*(?:'type'\s*:\s*'function'\s*,\s*)?"
    r"'name'\s*:\s*'(?P<tool>[^'\n]*)'\s*,\s*'(?:parameters|arguments)')".replace("'", '"'),
}
_THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<|channel|>analysis<|message|>": "<|end|>"}
_CLOSED = re.compile(r"</think>|\[/THINK\]")  # also of thoughts that the prompt has opened
_MOST = 100  # calls in a turn: a student that repeats a mark shall not read an error for each
_CUT = ("</parameter>", "</arg_value>")
_MARKS = [f"(?P<{name}>{mark})" for name, mark in _FORMS.items()]
_NEXT = re.compile("|".join([*_MARKS, *map(re.escape, (*_THOUGHTS, *_CUT)), _CLOSED.pattern]))
_LAST = re.compile("</tool_call>|</function>|<｜tool▁call▁end｜>")
_MORE = re.compile(r"[\s,;]*(?=\{|\[\s*\{)")
_END_OF_JSON = re.compile(r"[\s`]*(?=[<\[]|```json|\Z)")
_FUNCTION = re.compile(r"<function=([^>\n]*)>\s*")
_PARAMETER = (r"\s*<parameter=([^>\n]*)>\n?", r"\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|\Z))")
_GLM = (r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>", r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>|\Z))")
# A value that begins in thoughts, or in which the next one begins, has no end.
_ENDLESS = re.compile(r"</think>[^<]*<(?:tool_call>|function=)|(?m:^)<parameter=|</arg_key>\s*<arg_value>")
_END = re.compile(r"\s*(?:</function>|</tool_call>|\Z)")
_SPACE = re.compile(r"\s*")


class CallError(Exception):
    """A call cannot be read from a character of the turn on, or cannot be made. The student reads the text.

    The text has no part of the call: with a marker of the template in it the trajectory would end.
    """

    def __init__(self, text: str, position: int = 0) -> None:
        super().__init__(text)
        self.position = position


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Hold a call that the student wrote."""

    name: str
    arguments: dict[str, Any]
    is_text: bool = False  # the values are text as the student wrote it, not JSON


def _json_calls(text: str, position: int, name: str = "") -> tuple[list[ToolCall], int]:
    """Read objects with a name and arguments, or lists of them; behind a name its arguments."""
    calls: list[ToolCall] = []
    more = None
    while not calls or more:
        begin = more.end() if more else position
        try:
            value, position = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            where = getattr(error, "pos", begin)
            problem = f"{getattr(error, 'msg', 'too deep, or a number too long')}: character {where - begin}"
            raise CallError(f"the call cannot be read as JSON ({problem})", where) from None
        values = [{"name": name, "arguments": value}] if name else value if isinstance(value, list) else [value]
        calls += [_json_call(one, position) for one in values or [None]]
        more = None if name else _MORE.match(text, position)
    if _END_OF_JSON.match(text, position) is None:
        raise CallError("the call has text behind its JSON", position)
    return calls, position


def _json_call(value: Any, position: int) -> ToolCall:
    with suppress(AttributeError, KeyError, ValueError, RecursionError):
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # some models write them as JSON within JSON
            arguments = json.loads(arguments)
        if isinstance(value["name"], str) and isinstance(arguments, dict):
            return ToolCall(value["name"], arguments)
    raise CallError('the call must be a JSON object with "name" and "arguments"', position)


def _texts(text: str, position: int, name: str, tags: tuple[str, str]) -> tuple[list[ToolCall], int]:
    """Read arguments between tags. What closes one has another one or the end of the call behind it."""
    values: dict[str, Any] = {}
    key, end = map(re.compile, tags)
    while head := key.match(text, position):
        close = end.search(text, head.end())
        if close is None or head[1] in values or _ENDLESS.search(text, head.end(), close.start()):
            raise CallError("an argument of the call has no end, or stands there twice", head.end())
        values[head[1]] = text[head.end() : close.start()]
        position = close.end()
    if (last := _END.match(text, position)) is None:
        raise CallError("the call has text that belongs to no argument", position)
    return [ToolCall(name, values, is_text=True)], last.end()


def _tagged(text: str, position: int, name: str) -> tuple[list[ToolCall], int]:
    """Read GLM's arguments behind a name, a function in Qwen-Coder's form or with JSON, or Hermes' JSON."""
    if name:
        return _texts(text, position, name, _GLM)
    if (head := _FUNCTION.match(text, position)) is None:
        return _json_calls(text, position)
    if text.startswith("{", head.end()):
        return _json_calls(text, head.end(), head[1])
    return _texts(text, head.end(), head[1], _PARAMETER)


def parse_calls(text: str, names: Collection[str] | None = None) -> list[ToolCall | CallError]:
    """Return the calls in a turn in their order, and a CallError for each that is marked as one and cannot be read.

    The end of the turn also ends a call. Thoughts do not count: what stands between <think> and </think>. If the prompt
    has the <think>, they end at the first </think> outside of an argument.

    Args:
        names: tools of which JSON alone, as Llama 3.1 writes it, is a call if an answer begins with it; None: of any,
            also behind text.
    """
    calls: list[ToolCall | CallError] = []
    position = answer = 0  # where the text goes on, and where the answer begins
    while True:
        if len(calls) > _MOST:
            calls = [CallError(f"the turn has more than {_MOST} calls, and none is made")]
            if answer or (closed := _CLOSED.search(text, position)) is None:
                return calls
            position = closed.start()
        if (mark := _NEXT.search(text, position)) is None:
            return calls
        position = mark.end()
        is_alone = mark.lastgroup == "alone"
        if is_alone and names is not None and not (mark["tool"] in names and _SPACE.fullmatch(text, answer, position)):
            position += 1  # JSON of an answer
        elif mark.lastgroup:
            position = _read(mark.lastgroup, mark, calls, thinks=not answer)
        elif close := _THOUGHTS.get(mark[0]):
            if (end := text.find(close, position)) < 0:
                return calls
            position = answer = end + len(close)
        elif _CLOSED.match(mark[0]) and not answer:  # the prompt has opened the thoughts
            calls.clear()
            answer = position
        elif mark[0] in _CUT and calls and getattr(calls[-1], "is_text", False):
            calls[-1] = CallError("a value of the call has the text that ends a call", position)


def _read(form: str, mark: re.Match[str], calls: list[ToolCall | CallError], thinks: bool) -> int:
    """Append the calls behind a mark, and return where they end."""
    text = mark.string
    read = _tagged if form in ("block", "function") else _json_calls
    try:
        new_calls, end = read(text, mark.end(), mark.groupdict().get(f"{form}_name") or "")
        calls += new_calls
    except CallError as error:
        calls.append(error)
        last = _LAST.search(text, error.position)
        end = last.end() if last else len(text)
        if thinks and (closed := _CLOSED.search(text, error.position, end)):
            end = closed.start()  # the mark may stand in thoughts, which end within what is left out here
    return end


# Calls with values of several types, for the template to write.
PROBE = (
    ToolCall("find_item", {"query": 'a "quoted"\n<b> é', "count": 3, "filter": {"max": [2.5, None]}}),
    ToolCall("add_note", {"text": "12"}),
)


def written_calls(tokenizer: Any, variables: dict[str, Any]) -> tuple[str, ...]:
    """Return turns of both calls in `PROBE`, and of the first, in each way in which the chat template writes them.

    Some templates want arguments as an object, others as JSON text. Nothing: the template fails, or leaves out calls.
    `variables` are data.chat_template_kwargs.
    """
    about = {"description": "-", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": {"name": call.name, **about}} for call in PROBE]
    turns = []
    for calls, form in product((PROBE, PROBE[:1]), (dict, json.dumps)):
        functions = [{"name": call.name, "arguments": form(call.arguments)} for call in calls]
        tool_calls = [{"id": f"call{i:05}", "type": "function", "function": one} for i, one in enumerate(functions)]
        with suppress(TemplateFailed):
            template = ChatTemplate(tokenizer, {**variables, "tools": tools})
            plain = template.render(START, generate=False)
            message = {"role": "assistant", "content": "", "tool_calls": tool_calls}
            whole = template.render([QUESTION, message], generate=False)
            turn = whole[len(commonprefix([plain, whole])) :]
            turns.append(turn[: len(turn) - len(commonprefix([plain[::-1], turn[::-1]]))])
    return tuple(turn for turn in turns if PROBE[0].name in turn)


def are_probe(calls: Sequence[ToolCall | CallError], turn: str) -> bool:
    """Return whether these are the calls of `PROBE` that a turn names."""
    expected = [call for call in PROBE if call.name in turn]
    texts = [{k: v if isinstance(v, str) else json.dumps(v) for k, v in call.arguments.items()} for call in expected]
    as_text = [replace(call, arguments=text, is_text=True) for call, text in zip(expected, texts, strict=True)]
    return [*calls] in (expected, as_text)
