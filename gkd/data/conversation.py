"""Read the prompts of a row: text, messages of OpenAI or ShareGPT, or JSON of messages; also the teacher's own."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
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
# Meaning -> names in snake case of keys of messages and of columns, in datasets of other frameworks.
_NAMES = {
    "learned": ("step_loss_mask",),
    "mask": ("mask", "masks"),  # a value for each token, or one whose meaning differs
    "label": ("label", "labels", "kto_tag"),  # ids of tokens, a judgment of the answer, or a class
    "variables": (
        *("chat_template_kwargs", "apply_chat_template_kwargs", "chat_template_args", "template_kwargs"),
        *("enable_thinking", "thinking", "thinking_mode", "thinking_budget", "preserve_thinking", "clear_thinking"),
        *("keep_all_reasoning", "reasoning_effort", "reasoning_mode", "date_string", "model_identity"),
        *("custom_instructions", "builtin_tools", "custom_tools", "xml_tools", "python_tools"),
    ),
    "user": ("input", "context"),  # next to Alpaca's and Dolly's `instruction`
    "system": ("system", "system_prompt"),
    **{name: (name,) for name in ("history", "documents")},
    "tools": ("tools", "functions"),
    "media": ("image", "images", "audio", "audios", "video", "videos"),  # no text stands for them
}
_MEANINGS = {name: kind for kind, names in _NAMES.items() for name in names}
_WORDS = {  # words of names such as loss_mask, train_on_turn, isMasked and exclude_from_loss
    "learned": re.compile("loss(mask)?|train(ing|able|ed)?|learn(ed|able)?|supervised?|weights?"),
    "unlearned": re.compile("masked|ignored?|skip(ped)?|excluded?|no|not|dont"),
    "": re.compile(
        "masks?|is|has|do|should|use|with|to|on|in|for|from|this|per|turns?|tokens?|messages?|samples?|"
        "assistant|completion|response|target|action|detail|flag|enabled?|sft|scale|calc(ulate)?|computed?|included?"
    ),
}
ON_LEARNING = ("learned", "unlearned", "mask", "label")  # results of `meaning`
_LIST = re.compile(r"\[(?:true|false|none|null|[-\s\[\],.\de+])*\]")  # numbers, in Python's form and in JSON
_FLAGS = {**dict.fromkeys(("0", "false", "no", "off"), False), **dict.fromkeys(("1", "true", "yes", "on"), True)}
_EMPTY: tuple[Any, ...] = (None, "", "[]", "{}", "null", [], {})
_OTHER_PARTS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")  # parts of an answer
_PRIVILEGED = ("answer", "response")  # placeholders for text of one row that only the teacher reads

IMAGE = "\ue002"  # the place of an image in a text: a character for private use
BORDER = "\ue000\ue001"  # between texts of a message with images, which some templates separate
_PARTS = re.compile(f"({IMAGE})|{BORDER}")  # where a content with images or several texts is in parts
_IMAGE_PARTS = {"image", "image_url", "input_image"}  # types of parts

_NEW_CALLS = "write `tool_calls`, and the answers as messages of the role tool."

Message = dict[str, Any]
Turn = tuple[Message, bool]  # a message of a dataset's conversation, and whether it is learned
Setting = tuple[str, str]  # key that a prompt comes from, and its value, for errors


@dataclass(frozen=True, slots=True)
class Conversation:
    """The prompt of a row."""

    messages: tuple[dict[str, Any], ...] = ()  # each has a role, and a text as content; empty: `text` is the prompt
    text: str = ""
    tools: tuple[dict[str, Any], ...] = ()  # in OpenAI's format
    response: dict[str, Any] | None = None  # the last message with all its keys, if it is the assistant's
    converted: str = ""  # name of the form that was converted, to be counted
    images: tuple[Any, ...] = ()  # the value of each part that is an image, for each mark `IMAGE`; None: it has none


def read_conversation(
    value: Any, setting: Setting, where: str, *, from_json: bool = False, with_images: bool = False
) -> Conversation:
    """Return the conversation of a column's value.

    Lists of text parts are joined with line feeds, as vLLM's server does; in runs with images the user's stay parts.

    Args:
        value: text, a list of messages with role and content or with from and value, or such a list as JSON text.
        from_json: the value was such a text.

    Raises:
        ConfigError: the value has another form, or parts that are not text; it has no text at all; it is not valid
            Unicode; the arguments of a call have nulls of parquet.
    """
    if isinstance(value, str):
        decoded = json_messages(value)
        if decoded is None:
            if not value:
                raise _refused(setting, where, "is an empty text")
            check_unicode(value, setting, where)
            return Conversation(text=value)
        read_json = read_conversation(decoded, setting, where, from_json=True, with_images=with_images)
        return replace(read_json, converted="JSON text of messages")
    if isinstance(value, dict):
        raise _refused(setting, where, f"is one object with the keys {sorted(value)}", "write a list of messages.")
    if not isinstance(value, list) or not value:
        raise _refused(setting, where, f"is {quoted(value)}")
    sharegpt = isinstance(value[0], dict) and value[0].keys() >= {"from", "value"}
    images: list[Any] | None = [] if with_images else None
    read = [_message(message, i, sharegpt, setting, where, images) for i, message in enumerate(value, 1)]
    messages = [message for message, _ in read]
    if ".parquet:" in where and not from_json and _has_null([call_arguments(message) for message in messages]):
        problem = f"has nulls in {quoted(value)}, which parquet writes for arguments that only other calls have"
        raise _refused(setting, where, problem, "write the messages as JSON text.")
    converted = "ShareGPT messages" if sharegpt else "lists of text parts" if any(lists for _, lists in read) else ""
    response = messages.pop() if messages[-1]["role"] == "assistant" else None
    if old := [message for message in messages if message.get("function_call")]:
        raise _refused(setting, where, f"has a function_call, which templates leave out: {quoted(old[0])}", _NEW_CALLS)
    if not any(message["content"].strip() for message in messages):
        raise _refused(setting, where, f"has no text before the response: {quoted(value)}")
    return Conversation(tuple(messages), response=response, converted=converted, images=tuple(images or ()))


@cache
def meaning(name: str) -> str:
    """Return what a key of a message or a column of this name means; empty: nothing of it.

    The value 1 of a "learned" name includes a text, that of an "unlearned" one excludes it. Others are in `_NAMES`.
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|\W+", "_", name).lower().split("_")
    listed = _MEANINGS.get("_".join(words), "")
    kinds = [next((kind for kind, pattern in _WORDS.items() if pattern.fullmatch(word)), "other") for word in words]
    if listed or "other" in kinds:
        return listed
    if "masked" in words or {"learned", "unlearned"} <= {*kinds}:
        return "unlearned"
    return "learned" if "learned" in kinds and words[0] != "mask" else "mask" if {"mask", "masks"} & {*words} else ""


def is_empty(value: Any) -> bool:
    """Return whether a value stands for null in a file."""
    return value in _EMPTY or value != value


def is_learned(message: Mapping[str, Any], setting: Setting, where: str) -> bool:
    """Return whether a message is learned: the content of the assistant's, unless a key of it excludes it.

    Raises:
        ConfigError: it has other parts than its content; a key about learning is neither 0 nor 1, or not clear; it is
            not the assistant's, and a key includes it.
    """
    said = {key: value for key, value in message.items() if meaning(key) in ON_LEARNING and not is_empty(value)}
    flags = {key: value for key, value in said.items() if meaning(key).endswith("learned")}
    fix = "use weight, 0 or 1, and remove other keys; distill.token_weight weighs tokens."
    if (role := message["role"]) != "assistant":
        if any(value == (meaning(key) == "learned") for key, value in flags.items() if key != "weight"):
            raise ConfigError(*setting, f"a message of {where} ({role}) shall be learned: {quoted(flags)}.", fix)
        return False
    if extra_parts := {key: message[key] for key in _OTHER_PARTS if message.get(key)}:
        problem = f"{where} has parts of an answer outside of its content: {quoted(extra_parts)}."
        raise ConfigError(*setting, problem, "write them into the content, in the form that the student shall learn.")
    unclear = {key for key in said.keys() - flags.keys() if meaning(key) != "label" or not isinstance(said[key], str)}
    if unclear or any(value not in (0, 1) for value in flags.values()):
        raise ConfigError(*setting, f"a message of the assistant in {where} has {quoted(said)}.", fix)
    return all(value == (meaning(key) == "learned") for key, value in flags.items())


def split_conversation(whole: Conversation, setting: Setting, where: str) -> tuple[Conversation, tuple[Turn, ...]]:
    """Return the prompt, and the messages from the first to the last one of the assistant that is learned.

    Raises:
        ConfigError: there are no messages, no assistant's that is learned, none before it; or see `is_learned`.
    """
    messages = whole.messages if whole.response is None else (*whole.messages, whole.response)
    roles = [message["role"] for message in messages]
    learned = [i for i, message in enumerate(messages) if is_learned(message, setting, where)]
    if not learned or learned[0] == 0:
        problem = f"has the roles {roles}, and {len(learned)} messages to learn" if messages else "is a text"
        fix = "write messages: of the user, then of the assistant, and so on."
        raise ConfigError(*setting, f"the conversation of {where} {problem}.", fix)
    read = [{key: value for key, value in m.items() if meaning(key) not in ON_LEARNING} for m in messages]
    turns = tuple((read[i], i in learned) for i in range(learned[0], learned[-1] + 1))
    return replace(whole, messages=tuple(read[: learned[0]]), response=None), turns


def excludes(name: str, value: Any) -> bool:
    """Return whether a column excludes the response of its row from learning, in whole or in part."""
    kind = meaning(name)
    text = str(value).strip().lower()
    if kind == "label":  # numbers are classes
        return value is False or (text.startswith("[") and "-100" in text)
    with suppress(ValueError, TypeError):
        value = float(value)
        text = as_text(value)
    flag = _FLAGS.get(text)
    if flag is None:  # a mask or weight, or something else, as the loss of another model
        is_list = _LIST.fullmatch(text) is not None  # one number for each token or message
        is_weight = "weight" in name.lower() and isinstance(value, float)
        return is_list or is_weight or re.search("loss_?(mask|scale)", name.lower()) is not None
    return kind == "mask" or flag != (kind == "learned")


def read_tools(value: Any, setting: Setting, where: str) -> tuple[dict[str, Any], ...]:
    """Return the tools of a column's value: a list of OpenAI's objects, or such a list as JSON text.

    Raises:
        ConfigError: the value has another form, or nulls, which parquet writes for keys that other tools have.
    """
    fix = "write a list of {type: function, function: {name, description, parameters}}, or its JSON as a text."
    is_text = isinstance(value, str)
    try:
        decoded = value if not is_text else json.loads(value) if value.strip() else None
    except ValueError as error:
        problem = f"the tools of {where} are {quoted(value)}, which is not JSON ({error})."
        raise ConfigError(*setting, problem, fix) from error
    tools = [] if decoded is None else decoded
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
    are_messages = [isinstance(entry, dict) and any(entry.keys() >= keys for keys in forms) for entry in value]
    return value if are_messages and all(are_messages) else None


def _message(
    message: Any, i: int, sharegpt: bool, setting: Setting, where: str, images: list[Any] | None
) -> tuple[dict[str, Any], bool]:
    """Return message number `i` with a text as content, and whether the text was in parts."""
    if not isinstance(message, dict):
        raise _refused(setting, where, f"has {quoted(message)} as message {i}", "write {role, content} objects.")
    rest = {key: value for key, value in message.items() if value is not None}  # parquet has each key in each message
    role, content = (rest.pop(key, None) for key in (("from", "value") if sharegpt else ("role", "content")))
    name = _SHAREGPT.get(role, "") if sharegpt and isinstance(role, str) else role
    if name not in ROLES:
        roles = sorted(_SHAREGPT) if sharegpt else ROLES
        problem = f"has {quoted(role)} as the role of message {i}, which has the keys {sorted(message)}"
        raise _refused(setting, where, problem, f"use {', '.join(roles)}.")
    if media := [key for key in rest if meaning(key) == "media" and not is_empty(rest[key])]:
        problem = f"has {media} in message {i}, and only text is supported"
        raise _refused(setting, where, problem, "remove the row.")
    calls = rest.get("tool_calls", [])
    are_calls = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    if not are_calls or not all(isinstance(call.get("function") or call, dict) for call in calls):
        raise _refused(setting, where, f"has {quoted(calls)} as the tool calls of message {i}")
    content = "" if content is None and calls else content
    is_list = isinstance(content, list)
    text = _joined(content, i, name, setting, where, images) if is_list else content
    if not isinstance(text, str):
        problem = f"has {quoted(content)} as the content of message {i} ({name}), expected text"
        raise _refused(setting, where, problem)
    check_unicode(text, setting, where)
    return {**rest, "role": name, "content": text}, is_list


def in_parts(message: Message) -> Message:
    """Return a message whose content has images or several texts with a list of parts as content."""
    content = message["content"]
    if not _PARTS.search(content):
        return message
    texts = [text for text in _PARTS.split(content) if text]
    return {**message, "content": [{"type": "image"} if t == IMAGE else {"type": "text", "text": t} for t in texts]}


def call_arguments(message: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of each call of a message: an object, or JSON text as in OpenAI's API."""
    return [(call.get("function") or call).get("arguments", {}) for call in message.get("tool_calls", ())]


def _joined(pieces: Sequence[Any], i: int, role: str, setting: Setting, where: str, images: list[Any] | None) -> str:
    texts = []
    n_images = len(images or ())
    for part in pieces:
        fields = {"type": "text", "text": part} if isinstance(part, str) else part
        filled = {key for key, value in fields.items() if value is not None} if isinstance(fields, dict) else set()
        if images is not None and filled and str(fields.get("type")) in _IMAGE_PARTS:
            value = {key: fields[key] for key in filled - {"type", "index", "detail"} if fields[key] != ""}
            n = images.count(None)  # images of the column before this one
            if not value and fields.get("index", n) not in (None, n):
                raise _refused(setting, where, f"has {quoted(part)} in message {i}, and the next image is {n}")
            images.append(value or None)
            texts.append(IMAGE)
            continue
        is_text = filled <= {"type", "text"} and fields.get("type", "text") == "text"
        if not is_text or not isinstance(fields.get("text"), str):
            what = "only text is supported" + (" without data.images_key" if images is None else "")
            raise _refused(setting, where, f"has {quoted(part)} in message {i}, and {what}")
        texts.append(fields["text"])
    # Templates write parts one after the other; vLLM's server, for those that take texts alone, with line feeds.
    stay_parts = images is not None and (role == "user" or len(images) > n_images)
    return BORDER.join(filter(None, texts)) if stay_parts else "\n".join(texts)


def _refused(setting: Setting, where: str, problem: str, fix: str = "") -> ConfigError:
    fix = fix or "correct or remove the row: a prompt is text, or a list of messages with role and content."
    return ConfigError(*setting, f"the prompt of {where} {problem}.", fix)


def as_text(value: Any) -> str:
    """Return a value of a column as text, a number in digits: 42.0 as 42, because pandas makes floats of integers."""
    if not isinstance(value, float | Decimal) or not math.isfinite(value):
        return str(value)
    digits = f"{Decimal(str(value)) or 0:f}"  # -0.0 is 0, too
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def reference_text(value: Any) -> str | None:
    """Return a reference answer as text; None: it is missing, empty, NaN, a list or an object, which nothing equals."""
    is_none = value is None or isinstance(value, list | dict | bytes) or value != value or not str(value).strip()
    return None if is_none else as_text(value)


def quoted(value: Any) -> str:
    """Return the representation of a value, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class TeacherPrompts:
    """Return the teacher's prompt of each row, before tokenization, and count them.

    `template` is teacher.prompt_template; `is_template`: they are made with it. Raises ConfigError: it is not valid.
    """

    def __init__(self, config: DataConfig, template: str) -> None:
        self._config = config
        self._template = template
        self.is_template = bool(template)
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
    def columns(self) -> set[str]:
        """Return the columns of a row that `of` uses, apart from the prompt's."""
        return {self._columns.get(name, name) for _, name in self._parts if name}

    def of(self, row: Mapping[str, Any], prompt: Conversation, where: str) -> Conversation | None:
        """Return the row's prompt for the teacher, made from the student's; None means the student's prompt.

        A template replaces the text of a prompt. Of messages it replaces the last one; the others stay. Raises
        ConfigError: the row lacks a column of the template, or its prompt for the teacher is unusable.
        """
        self._n_rows += 1
        teacher_prompt = None
        if self._template:
            teacher_prompt = self._filled(row, prompt, where)
        elif value := row.get(self._config.teacher_prompt_key) if self._config.teacher_prompt_key else None:
            teacher_prompt = read_conversation(value, self.setting, where, with_images=bool(self._config.images_key))
        self._n_own += teacher_prompt is not None
        return teacher_prompt

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

        `key` is the config key of the files. Raises ConfigError: no training row has the column.
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
