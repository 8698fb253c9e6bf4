"""Read the prompts of a row: text, messages of OpenAI or ShareGPT, or JSON of messages; also the teacher's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gkd.config.check_values import template_parts
from gkd.config.schema_sections import DataConfig
from gkd.errors import ConfigError
from gkd.log import get_logger

log = get_logger("data")

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

# Placeholders of text that each row has for itself, and the student does not read.
_PRIVILEGED = ("answer", "response")

_NEW_CALLS = "write `tool_calls`, and the answers as messages of the role tool."

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


def read_conversation(value: Any, setting: Setting, where: str, *, from_json: bool = False) -> Conversation:
    """Return the conversation of a column's value.

    Contents that are lists of text parts are joined with line feeds, as vLLM's server does.

    Args:
        value: text, a list of messages with role and content or with from and value, or such a list as JSON text.
        where: file and line of the row.
        from_json: the value was such a text.

    Raises:
        ConfigError: the value has another form, or parts that are not text; it has no text at all; it is not valid
            Unicode; the arguments of a call have nulls of parquet.
    """
    if isinstance(value, str):
        found = json_messages(value)
        if found is None:
            if not value:
                raise _refused(setting, where, "is an empty text")
            check_unicode(value, setting, where)
            return Conversation(text=value)
        return replace(read_conversation(found, setting, where, from_json=True), converted="JSON text of messages")
    if isinstance(value, dict):
        raise _refused(setting, where, f"is one object with the keys {sorted(value)}", "write a list of messages.")
    if not isinstance(value, list) or not value:
        raise _refused(setting, where, f"is {quoted(value)}")
    sharegpt = isinstance(value[0], dict) and value[0].keys() >= {"from", "value"}
    read = [_message(message, i, sharegpt, setting, where) for i, message in enumerate(value, 1)]
    messages = [message for message, _ in read]
    if ".parquet:" in where and not from_json and _has_null([call_arguments(message) for message in messages]):
        problem = f"has nulls in {quoted(value)}, which parquet writes for arguments that only other calls have"
        raise _refused(setting, where, problem, "write the messages as JSON text.")
    converted = "ShareGPT messages" if sharegpt else "lists of text parts" if any(parts for _, parts in read) else ""
    response = messages.pop() if messages[-1]["role"] == "assistant" else None
    if old := [message for message in messages if message.get("function_call")]:
        raise _refused(setting, where, f"has a function_call, which templates leave out: {quoted(old[0])}", _NEW_CALLS)
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
    if problem := unicode_problem(text):
        raise _refused(setting, where, problem)


def unicode_problem(text: str) -> str:
    """Return why a text cannot be encoded; empty if it can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is not valid Unicode (lone surrogate at character {error.start + 1}: {quoted(text)})"
    return ""


def json_messages(text: str) -> list[Any] | None:
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
    are_calls = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    if not are_calls or not all(isinstance(call.get("function") or call, dict) for call in calls):
        raise _refused(setting, where, f"has {quoted(calls)} as the tool calls of message {i}")
    content = "" if content is None and calls else content
    parts = isinstance(content, list)
    text = _joined(content, i, setting, where) if parts else content
    if not isinstance(text, str):
        found = f"has {quoted(content)} as the content of message {i} ({name}), expected text"
        raise _refused(setting, where, found)
    check_unicode(text, setting, where)
    return {**rest, "role": name, "content": text}, parts


def call_arguments(message: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of each call of a message: an object, or JSON text as in OpenAI's API."""
    return [(call.get("function") or call).get("arguments", {}) for call in message.get("tool_calls", ())]


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


def as_text(value: Any) -> str:
    """Return a value of a column as text, a whole float as an integer: pandas makes floats of a column with nulls."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def quoted(value: Any) -> str:
    """Return the representation of a value, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class TeacherPrompts:
    """Return the teacher's prompt of each row, before tokenization, and count them.

    Args:
        template: teacher.prompt_template.

    Raises:
        ConfigError: the template is not valid.
    """

    def __init__(self, config: DataConfig, template: str) -> None:
        self._config, self._template = config, template
        self._parts = template_parts(template) if template else []
        self._columns = {
            "prompt": config.prompt_key,
            "answer": config.answer_key,
            "response": config.response_key,
        }
        self._n_rows = self._n_own = 0

    @property
    def setting(self) -> tuple[str, str]:
        """Return the key that the teacher's prompts come from, and its value."""
        if self._template:
            return "teacher.prompt_template", self._template
        return "data.teacher_prompt_key", self._config.teacher_prompt_key

    @property
    def is_template(self) -> bool:
        """Return whether the teacher's prompts are made with teacher.prompt_template."""
        return bool(self._template)

    @property
    def columns(self) -> set[str]:
        """Return the columns of a row that `of` uses, apart from the prompt's."""
        return {self._columns.get(name, name) for _, name in self._parts if name}

    def of(self, row: Mapping[str, Any], prompt: Conversation, where: str) -> Conversation | None:
        """Return the row's prompt for the teacher. None means the student's prompt.

        A template replaces the text of a prompt. Of messages it replaces the last one; the others stay.

        Args:
            prompt: the student's.
            where: file and line of the row.

        Raises:
            ConfigError: the row lacks a column of the template, or its prompt for the teacher is unusable.
        """
        self._n_rows += 1
        found = None
        if self._template:
            found = self._filled(row, prompt, where)
        elif own := row.get(self._config.teacher_prompt_key) if self._config.teacher_prompt_key else None:
            found = read_conversation(own, self.setting, where)
        self._n_own += found is not None
        return found

    def _filled(self, row: Mapping[str, Any], prompt: Conversation, where: str) -> Conversation:
        last = prompt.messages[-1] if prompt.messages else None
        texts: dict[str, Any] = {"prompt": last["content"] if last else prompt.text}
        if not self._columns["response"]:  # the response is the last message
            texts["response"] = prompt.response and prompt.response["content"]
        for name in {name for _, name in self._parts if name} - texts.keys():
            texts[name] = row.get(self._columns.get(name, name))
        for name, value in texts.items():
            if not isinstance(value, str | int | float) or value != value:
                column = self._columns.get(name, name)
                problem = f"{where} has no text in the column {column!r}; its columns are {sorted(row)}."
                raise ConfigError(*self.setting, problem, "correct the row, or the placeholder.")
        text = "".join(before + (as_text(texts[name]) if name else "") for before, name in self._parts)
        messages = (*prompt.messages[:-1], {**last, "content": text}) if last else ()
        return replace(prompt, messages=messages, text="" if last else text)

    def log(self, key: str) -> None:
        """Log how many rows have a prompt for the teacher, and warn if training rows hold what differs per row.

        Args:
            key: config key of the files.

        Raises:
            ConfigError: no training row has the column.
        """
        setting, value = self.setting
        if not value:
            return
        if not self._n_own and key == "data.train_files":
            problem = "no row of data.train_files has a value in this column."
            raise ConfigError(setting, value, problem, "name the column of the teacher's prompts, or remove the key.")
        names = [name for name in _PRIVILEGED if name in {name for _, name in self._parts}]
        if names and key == "data.train_files":
            log.warning(
                "%s has {%s}, a text of each row that the student does not read: a weak signal, because the student "
                "cannot produce it from its own prompt. A rule that all rows share is learned. docs/losses.md.",
                setting,
                "} and {".join(names),
            )
        log.info("%s: %d of %d rows have a prompt for the teacher", key, self._n_own, self._n_rows)
