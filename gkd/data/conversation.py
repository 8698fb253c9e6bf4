"""Read the prompt of a row in the forms that people have: text, messages of OpenAI or ShareGPT, JSON of messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gkd.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
# Keys that include or exclude a message in OpenAI's and Mistral's, ms-swift's and axolotl's datasets.
_LEARNED = ("weight", "loss", "train", "training")
_OTHER_PARTS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")  # parts of an answer
_MEDIA = {"image", "images", "audio", "audios", "video", "videos"}  # keys of a message that no text stands for

Setting = tuple[str, str]  # key that a prompt comes from, and its value, for errors


@dataclass(frozen=True, slots=True)
class Conversation:
    """The prompt of a row.

    Attributes:
        messages: with a role and a text as content each; empty means `text` is the prompt.
        text: of a prompt that is one string.
        tools: that the prompt offers, in OpenAI's format.
        response: the last assistant message with all its keys, taken off; None: the last message was another one.
        converted: the form that was converted, to be counted; empty if there was none.
    """

    messages: tuple[dict[str, Any], ...] = ()
    text: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    response: dict[str, Any] | None = None
    converted: str = ""


def read_conversation(value: Any, setting: Setting, where: str) -> Conversation:
    """Return the conversation of a column's value.

    Contents that are lists of text parts are joined with line feeds, as vLLM's server does.

    Args:
        value: text, a list of messages with role and content or with from and value, or such a list as JSON text.
        where: file and line of the row.

    Raises:
        ConfigError: the value has another form, or parts that are not text; it has no text at all; it is not valid
            Unicode.
    """
    if isinstance(value, str):
        found = _json_messages(value)
        if found is None:
            if not value:
                raise _refused(setting, where, "is an empty text")
            check_unicode(value, setting, where)
            return Conversation(text=value)
        return replace(read_conversation(found, setting, where), converted="JSON text of messages")
    if isinstance(value, dict):
        raise _refused(setting, where, f"is one object with the keys {sorted(value)}", "write a list of messages.")
    if not isinstance(value, list) or not value:
        raise _refused(setting, where, f"is {quoted(value)}")
    sharegpt = isinstance(value[0], dict) and value[0].keys() >= {"from", "value"}
    read = [_message(message, i, sharegpt, setting, where) for i, message in enumerate(value, 1)]
    messages = [message for message, _ in read]
    converted = "ShareGPT messages" if sharegpt else "lists of text parts" if any(parts for _, parts in read) else ""
    response = messages.pop() if messages[-1]["role"] == "assistant" else None
    if not any(message["content"].strip() for message in messages):
        raise _refused(setting, where, f"has no text before the response: {quoted(value)}")
    return Conversation(tuple(messages), response=response, converted=converted)


def is_learned(message: Mapping[str, Any], setting: Setting, where: str) -> bool:
    """Return whether a message of the assistant is learned: its content alone, unless the row excludes it.

    Raises:
        ConfigError: it has other parts than its content, or a weight that is neither 0 nor 1.
    """
    if others := {key: message[key] for key in _OTHER_PARTS if message.get(key)}:
        problem = f"{where} has parts of an answer outside of its content: {quoted(others)}."
        raise ConfigError(*setting, problem, "write them into the content, in the form that the student shall learn.")
    flags = {key: message[key] for key in _LEARNED if message.get(key) is not None}
    if any(value not in (0, 1) for value in flags.values()):
        fix = "use 0 or 1; distill.token_weight weighs tokens."
        raise ConfigError(*setting, f"a message of the assistant in {where} has {quoted(flags)}.", fix)
    return all(flags.values())


def read_tools(value: Any, setting: Setting, where: str) -> tuple[dict[str, Any], ...]:
    """Return the tools of a column's value: a list of OpenAI's objects, or such a list as JSON text.

    Raises:
        ConfigError: the value has another form, or nulls, which parquet writes for keys that other tools have.
    """
    fix = "write a list of {type: function, function: {name, description, parameters}}, or its JSON as a text."
    is_text = isinstance(value, str)
    try:
        found = value if not is_text else json.loads(value) if value.strip() else None
    except ValueError as error:
        problem = f"the tools of {where} are {quoted(value)}, which is not JSON ({error})."
        raise ConfigError(*setting, problem, fix) from error
    tools = [] if found is None else found
    if wrong := [tool for tool in tools if not _is_tool(tool)] if isinstance(tools, list) else [tools]:
        raise ConfigError(*setting, f"the tools of {where} have {quoted(wrong[0])}.", fix)
    if not is_text and _has_null(tools):
        problem = f"the tools of {where} have nulls, which parquet writes for keys that other tools have."
        raise ConfigError(*setting, problem, "write the column as JSON text.")
    check_unicode(json.dumps(tools, ensure_ascii=False), setting, where)
    return tuple(tools)


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return isinstance(name, str) and bool(name)


def _has_null(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, items))


def check_unicode(text: str, setting: Setting, where: str) -> None:
    """Raise ConfigError if a text cannot be encoded: half of a surrogate pair, as text cut in UTF-16 has it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"is not valid Unicode (lone surrogate at character {error.start + 1}: {quoted(text)})"
        raise _refused(setting, where, found) from error


def _json_messages(text: str) -> list[Any] | None:
    """Return the messages whose JSON a text is, or None if it is another text."""
    if not text.lstrip().startswith("[") or not text.rstrip().endswith("]"):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    forms = {"role", "content"}, {"from", "value"}
    are_messages = [isinstance(each, dict) and any(each.keys() >= keys for keys in forms) for each in value]
    return value if are_messages and all(are_messages) else None


def _message(message: Any, i: int, sharegpt: bool, setting: Setting, where: str) -> tuple[dict[str, Any], bool]:
    """Return message number `i` with a text as content, and whether the text was in parts."""
    if not isinstance(message, dict):
        raise _refused(setting, where, f"has {quoted(message)} as message {i}", "write {role, content} objects.")
    rest = {key: value for key, value in message.items() if value is not None}  # parquet has each key in each message
    role, content = (rest.pop(key, None) for key in (("from", "value") if sharegpt else ("role", "content")))
    name = _SHAREGPT.get(role, "") if sharegpt and isinstance(role, str) else role
    if name not in ROLES:
        known = sorted(_SHAREGPT) if sharegpt else ROLES
        found = f"has {quoted(role)} as the role of message {i}, which has the keys {sorted(message)}"
        raise _refused(setting, where, found, f"use {', '.join(known)}.")
    if not rest.keys().isdisjoint(_MEDIA):
        found = f"has {sorted(_MEDIA & rest.keys())} in message {i}, and only text is supported"
        raise _refused(setting, where, found, "remove the row.")
    calls = rest.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _refused(setting, where, f"has {quoted(calls)} as the tool calls of message {i}")
    content = "" if content is None and calls else content
    parts = isinstance(content, list)
    text = _joined(content, i, setting, where) if parts else content
    if not isinstance(text, str):
        found = f"has {quoted(content)} as the content of message {i} ({name}), expected text"
        raise _refused(setting, where, found)
    check_unicode(text, setting, where)
    return {**rest, "role": name, "content": text}, parts


def _joined(parts: Sequence[Any], i: int, setting: Setting, where: str) -> str:
    texts = []
    for part in parts:
        fields = {"type": "text", "text": part} if isinstance(part, str) else part
        filled = {key for key, value in fields.items() if value is not None} if isinstance(fields, dict) else set()
        is_text = filled <= {"type", "text"} and fields.get("type", "text") == "text"
        if not is_text or not isinstance(fields.get("text"), str):
            raise _refused(setting, where, f"has {quoted(part)} in message {i}, and only text is supported")
        texts.append(fields["text"])
    return "\n".join(texts)


def _refused(setting: Setting, where: str, found: str, fix: str = "") -> ConfigError:
    fix = fix or "correct or remove the row: a prompt is text, or a list of messages with role and content."
    return ConfigError(*setting, f"the prompt of {where} {found}.", fix)


def quoted(value: Any) -> str:
    """Return the representation of a value, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
