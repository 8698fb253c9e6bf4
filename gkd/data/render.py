"""Render prompts with the tokenizer's chat template, and check that the model reads what is in the row.

A rendered prompt must be the frame that `gkd.data.template` proves, with the texts of the row in it. Some templates
strip a text or drop its thoughts, or move the system's text. Then each text must occur in order, and the prompt must
end as the template ends one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gkd.data.conversation import Conversation, Message, Setting, call_arguments, in_parts, quoted, read_conversation
from gkd.data.template import ANSWER, ChatTemplate, TemplateFailed, Tools, forms_of, said, texts_of
from gkd.errors import ConfigError
from teacher_server.vision.images import ImageError

if TYPE_CHECKING:
    from teacher_server.vision.processor import ImageProcessor

AS_IS = "text that is rendered already"  # a value of `Rendered.converted`
_SHORTEST_HEAD = 4  # characters: texts begin with a shorter one by chance
SYSTEM = ("system", "developer")  # roles


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the model reads it."""

    text: str  # with the special tokens of the template
    ids: list[int]
    converted: str  # the form of the row that was converted; empty if there was none
    messages: tuple[Message, ...] = ()  # messages that the template got; none if it was not applied
    tools: Tools = ()


class PromptRenderer:
    """Render and tokenize conversations for one tokenizer.

    Args:
        chat_template, variables, system_prompt: data.chat_template, data.chat_template_kwargs and data.system_prompt.
        tools: key that the tools come from, and its value; None: no prompt offers tools.
        images: of the model, if prompts may have some; the tokens are then those of its processor, which puts the
            beginning in front of what a template writes.

    Attributes:
        dated: the date that is in a prompt, or nothing.
        template, applies: the chat template, and whether it is used.
        image_token: id of the token of an image; None: prompts have no images.

    Raises:
        ConfigError: `always` without a template; a variable, a system message or tools that the template does not have.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str,
        variables: dict[str, Any],
        system_prompt: str = "",
        tools: Setting | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        self._images = images
        self.image_token = None if images is None else images.token_id
        self._tokenizer = tokenizer
        self._setting = "data.chat_template", chat_template
        self.template = ChatTemplate(tokenizer, variables)
        self.applies = self.template.exists and chat_template != "never"
        self.dated = ""
        if chat_template == "always" and not self.template.exists:
            raise ConfigError(*self._setting, "this tokenizer has no chat template.", "use auto or never.")
        for name, value in variables.items():
            self._check_variable(name, (f"data.chat_template_kwargs.{name}", value))
        if tools is not None:
            self._check_variable("tools", tools)
        if tools is not None and "tools" in variables:
            raise ConfigError(*tools, "data.chat_template_kwargs.tools is set, too.", "remove one of them.")
        self._tools_setting = tools or ("data.tools_key", "")
        self._begin = self._tokens_in_front()
        pieces = self.template.frame([said("user", "")]).pieces if self.applies else ()
        self._end = "".join(pieces[-1:]).strip()  # with which the template ends a prompt
        self._markers, self._heads = self._separators(pieces)
        self._marker = re.compile("|".join(map(re.escape, self._markers)) or "(?!)")
        # The template may write the beginning, and not the tokenizer. Of some models each turn begins with it.
        self._first = [] if tokenizer.bos_token in (None, *self._heads) else [tokenizer.bos_token_id]
        self._system = system_prompt
        if system_prompt:
            key = "data.system_prompt"
            example = [said("system", system_prompt), said("user", "-")]
            try:  # whether the model reads it
                self.render(read_conversation(example, (key, system_prompt), key), (key, system_prompt), key)
            except ConfigError as error:
                raise ConfigError(key, system_prompt, error.problem, "correct the text, or remove the key.") from error

    def _check_variable(self, name: str, setting: tuple[str, Any]) -> None:
        """Raise ConfigError unless the template uses a variable."""
        if not self.applies or not self.template.uses(name):
            problem = f"the chat template does not use {name}." if self.applies else "no chat template is applied."
            raise ConfigError(*setting, problem, "remove it.")

    def render(self, prompt: Conversation, setting: Setting, where: str) -> Rendered:
        """Return a prompt's text and tokens.

        A text that begins as the template's prompts do is rendered already, and is used as it is. Other prompts begin
        with the system prompt, unless they have a message of the system. `where` is file and line of the row. Raises
        ConfigError: the template fails, or leaves out or changes a text; a text holds markers of the template; a
        rendered text lacks the system prompt or tools; there is no template for messages, or no token.
        """
        if prompt.messages and not self.applies:
            has = self.template.exists
            reason = "chat templates are disabled" if has else "this tokenizer has no chat template"
            fix = "use auto, or string prompts." if has else "use string prompts, or add one to the tokenizer."
            problem = f"the prompt of {where} is a list of messages, but {reason}."
            raise ConfigError(*self._setting, problem, fix)
        if not self.applies:
            return Rendered(prompt.text, self._encode(prompt.text, setting, where), prompt.converted)
        if not prompt.messages and self.is_rendered(prompt.text):
            if self._system or prompt.tools:
                lacking = self._tools_setting if prompt.tools else ("data.system_prompt", self._system)
                problem = f"the prompt of {where} is rendered already, and nothing can be put in front of it."
                raise ConfigError(*lacking, problem, "write messages, or remove the key.")
            end = prompt.text.rstrip()
            if self._end and not end.endswith(self._end) and end.endswith(self._markers):
                raise self._bad_end(prompt.text, self._end, setting, where)
            return Rendered(prompt.text, self._encode(prompt.text, setting, where), AS_IS)
        messages = tuple(map(in_parts, prompt.messages or (said("user", prompt.text),)))
        if self._system and not has_system(prompt):
            messages = (said("system", self._system), *messages)
        text = self._write(messages, prompt.tools, where)
        self._check(text, messages, setting, where, prompt.tools)
        if self.template.date in text:
            self.dated = self.dated or self.template.date
        ids = self._encode(text, setting, where, begins=self.image_token is None)
        return Rendered(text, ids, prompt.converted, messages, prompt.tools)

    def changes(self, prompt: Rendered, name: str, value: Any) -> bool:
        """Return whether a prompt is another one, or none, with variables that a column has: one, or an object."""
        with suppress(ValueError):
            value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, dict) and name.endswith("args"):
            return True
        more = value if isinstance(value, dict) else {name: value}
        more = {key: variable for key, variable in more.items() if variable is not None}
        try:
            text = self.template.render(prompt.messages, prompt.tools, more=more) if prompt.messages else prompt.text
        except TemplateFailed:
            return True
        return text != prompt.text

    def continued(self, prompt: Rendered, messages: Sequence[Message], where: str) -> Rendered:
        """Return a prompt with more messages, without tokens: those of a trajectory are others."""
        messages = (*prompt.messages, *messages)
        return Rendered(self._write(messages, prompt.tools, where), [], "", messages, prompt.tools)

    def as_text(self, message: Message, setting: Setting, where: str) -> Message:
        """Return a message of a later turn with one text: what the template writes for its texts and images.

        Raises ConfigError: it writes them in another way if the message stands there again, as with numbers of images.
        """
        turn = in_parts({"role": message["role"], "content": message["content"]})
        if isinstance(turn["content"], str):
            return message
        before, after = self.template.frame([said(turn["role"], "")]).pieces or ("", "")
        text = self._write([turn], (), where).removeprefix(before).removesuffix(after)
        if self._write([turn, said("assistant", ANSWER), turn], (), where).count(text) < 2:
            problem = f"the chat template writes the parts of {where} in another way than those of one message alone."
            raise ConfigError(*setting, problem, "use one image or text, or no data.chat_template_kwargs.")
        return {**message, "content": text}

    def cut(self, prompt: Rendered, limit: int, side: str) -> Rendered | None:
        """Return a prompt without the tokens above a limit on one side, "left" or "right"; its first tokens stay.

        Return None if the beginning of the answer, which the template writes at the end, would be lost.
        """
        if side == "right" and self.applies:
            return None
        begin = self._begin or self._first
        n = len(begin) if prompt.ids[: len(begin)] == begin else 0
        left = [*prompt.ids[:n], *prompt.ids[len(prompt.ids) - limit + n :]]
        ids = (left if side == "left" else prompt.ids)[:limit]
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return replace(prompt, text=text, ids=ids)

    def _ids(self, text: str, *, whole: bool = False) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=whole)["input_ids"])

    def _encode(self, text: str, setting: Setting, where: str, begins: bool = False) -> list[int]:
        """Return the tokens of a text, which `begins` itself or gets the tokenizer's beginning once; without an end."""
        try:
            text = text if self._images is None else self._images.spelled(text)
        except ImageError as error:
            raise ConfigError(*setting, f"the prompt of {where}: {error}.", "remove the line feeds.") from error
        ids = self._ids(text)
        if not ids:
            raise ConfigError(*setting, f"the prompt of {where} has no tokens.", "remove the row.")
        return ids if begins or ids[: len(self._begin)] == self._begin else [*self._begin, *ids]

    def _tokens_in_front(self) -> list[int]:
        """Return the tokens that the tokenizer puts before a text, such as the beginning of the sequence."""
        plain = self._ids("a")
        whole = self._ids("a", whole=True)
        starts = (i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain)
        return whole[: next(starts, 0)] if plain else []

    def _write(self, messages: Sequence[Mapping[str, Any]], tools: Tools, where: str) -> str:
        """Return the text of a prompt. Raises ConfigError if the template fails."""
        try:
            return self.template.render(messages, tools)
        except TemplateFailed as error:
            raise ConfigError(*self._setting, f"{error}: the prompt of {where}.", "correct it or the row.") from error

    def _check(self, text: str, messages: Sequence[Message], setting: Setting, where: str, tools: Tools) -> None:
        """Raise ConfigError unless the prompt holds each tool and message and ends as the template ends one."""
        texts = texts_of(messages)
        for message in texts:
            content = message["content"]
            marker = self._marker.search(content)
            is_prompt = len(self._end) >= _SHORTEST_HEAD and content.rstrip().endswith(self._end)
            if marker or is_prompt or self.is_rendered(content):
                what = f"with {marker[0]}, which separates messages" if marker else "rendered already"
                problem = f"a message of {where} ({message['role']}) is {quoted(content)}, {what}."
                fix = "correct the row. A rendered text must be one string; data.chat_template=never takes it as it is."
                raise ConfigError(*setting, problem, fix)
        frame = self.template.frame(messages, tools)
        around = "".join(frame.pieces) or text  # A user's text may have the name of a tool.
        if unread := [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in around]:
            problem = f"the chat template leaves out the tool {unread[0]} of {where}; it writes {quoted(text)}."
            raise ConfigError(*self._tools_setting, problem, "correct the row or the template, or remove the key.")
        for arguments in (value for message in messages for value in call_arguments(message)):
            if isinstance(arguments, str) and arguments.strip() and json.dumps(arguments, ensure_ascii=False) in text:
                problem = f"the chat template puts the arguments of a call of {where} in quotes: {quoted(arguments)}."
                raise ConfigError(*setting, problem, "write an object, in parquet in messages as JSON text.")
        lost = self._without_calls(messages, where, tools)
        if not lost and frame.holds(text, texts):
            return
        lost += [texts[i] for i in frame.dropped if texts[i]["content"]] or _not_in_order(text, texts)
        if lost:
            content = quoted(lost[0]["content"] or lost[0].get("tool_calls"))
            problem = (
                f"the chat template leaves out or changes the text of a message of {where} "
                f"({lost[0]['role']}: {content}). The rendered prompt is {quoted(text)}."
            )
            fix = "write the message in a role and form that the template has, or correct the template."
            raise ConfigError(*setting, problem, fix)
        if frame.pieces and not text.endswith(frame.pieces[-1]):
            raise self._bad_end(text, frame.pieces[-1], setting, where)

    def _without_calls(self, messages: Sequence[Message], where: str, tools: Tools) -> list[Message]:
        """Return the messages with a call that the template leaves out: it writes other names for the functions."""
        names = [[f"gkdcall{i}n{j}e" for j in range(len(m.get("tool_calls", ())))] for i, m in enumerate(messages)]
        if not any(names):
            return []
        pairs = [*zip(messages, names, strict=True)]
        marked = [{**m, "tool_calls": [*map(_renamed, m["tool_calls"], calls)]} if calls else m for m, calls in pairs]
        text = self._write(marked, tools, where)
        return [message for message, calls in pairs if any(name not in text for name in calls)]

    def is_rendered(self, text: str) -> bool:
        """Return whether a text begins as the turns of the template do; it need not without a template."""
        if not self.applies:
            return True
        text = text.lstrip()
        without_begin = text.removeprefix(self._tokenizer.bos_token or "").lstrip()
        return text.startswith(self._heads) or without_begin.startswith(self._heads)

    def _bad_end(self, text: str, end: str, setting: Setting, where: str) -> ConfigError:
        problem = f"the prompt of {where} ends with {text[-80:]!r}, and the chat template ends a prompt with {end!r}."
        return ConfigError(*setting, problem, "add the beginning of the response, or correct the template.")

    def _separators(self, pieces: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the special tokens that the template writes, and the beginnings of rendered prompts."""
        if self.applies:
            pieces += self.template.frame([said("system", ""), said("user", "")]).pieces
        special = {*self.template.special.values()}
        markers = tuple(sorted(token for token in special if any(token in piece for piece in pieces)))
        begin = self._tokenizer.bos_token or ""
        head = pieces[0].strip().removeprefix(begin).lstrip() if pieces else ""
        # The beginning alone does not tell: <s> is also a tag of HTML. Some models begin each turn with it, however.
        turns = tuple(token for token in markers if token != begin or any(begin in piece for piece in pieces[1:2]))
        return markers, (*turns, head) if len(head) >= _SHORTEST_HEAD else turns


def has_system(prompt: Conversation) -> bool:
    """Return whether a conversation has a message of the system, or of the developer, as some templates call it."""
    return any(message["role"] in SYSTEM for message in prompt.messages)


def _renamed(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a call of a function with another name."""
    return {**call, "function": _renamed(call["function"], name)} if call.get("function") else {**call, "name": name}


def _not_in_order(text: str, messages: Sequence[Message]) -> list[Message]:
    """Return the messages that do not follow the ones before them. The system's text may stand anywhere."""
    lost = list[Message]()
    position = 0
    for message in messages:
        content = message["content"]
        moves = message["role"] == "system"
        first = 0 if moves else position
        forms = filter(None, forms_of(message)) if content.strip() else [content]
        places = [(place, len(form)) for form in forms if (place := text.find(form, first)) >= 0]
        if places and not moves:
            position = sum(min(places))
        elif not places and content.strip():
            lost.append(message)
    return lost
