"""The chat template of a tokenizer: render conversations, prove what stands around their texts, split behind a turn.

A template is a program: it may leave out, move or change a text, and no error tells. So it gets marks in place of texts
first. What it writes around the marks is the `Frame`. A text of the template is right if it consists of the frame and
of the messages' own texts. All others use this proof: prompts (`gkd.data.render`), answers (`gkd.data.answer_text`),
and messages behind a turn (`gkd.data.chat_delta`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import count
from typing import Any

from gkd.errors import DataError

Message = Mapping[str, Any]
Tools = tuple[dict[str, Any], ...]
Variables = Mapping[str, Any]

MARK = "\ue000{}\ue001"  # characters for private use, which no template changes
ANSWER = MARK.format("answer")
TAG = re.compile(r"</?[^\s<>]+>|\[/?[A-Z_]+\]")  # markers of templates
_MARKS = re.compile(MARK.format(r"\d+"))
_CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
THOUGHT = f"<think>\n{MARK.format('why')}\n</think>\n\n"
_FILLS = ("4", " 4\n", "\n\n", "é🙂", "")  # texts of messages in the proof on tokens


def said(role: str, text: str) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": text}


QUESTION = said("user", MARK.format("q"))
START = (QUESTION, said("assistant", ANSWER))


class TemplateFailed(DataError):
    """The chat template raised an error."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Holds what the template writes around the texts of messages.

    The last three fields are those of messages behind a turn, see `ChatTemplate.frame_behind`.
    """

    pieces: tuple[str, ...] = ()  # one more than texts; empty: the template fails, or drops, moves or repeats a text
    dropped: tuple[int, ...] = ()  # indices of the texts that it leaves out
    end: str = ""  # text of the turn's end token
    watched: frozenset[int] = frozenset()  # ids of special tokens, and of added tokens that the pieces have
    order: tuple[int, ...] = ()  # watched ids of the pieces; those of the texts would come between them

    def around(self, texts: Sequence[str]) -> str:
        """Return the pieces with these texts between them."""
        return "".join(map(str.__add__, self.pieces, [*texts, ""]))

    def holds(self, text: str, messages: Sequence[Message]) -> bool:
        """Return whether a text is the pieces with the texts of messages between them, each in one of its forms."""
        if not self.pieces or not text.startswith(self.pieces[0]):
            return False
        ends = {len(self.pieces[0])}  # where the next text may begin
        for piece, message in zip(self.pieces[1:], messages, strict=True):
            written = [form + piece for form in forms_of(message)]
            ends = {end + len(form) for end in ends for form in written if text.startswith(form, end)}
        return len(text) in ends


class ChatTemplate:
    """The chat template of one tokenizer.

    Attributes:
        exists: the tokenizer has a template; without it only `added` and `special` can be used.
        added: id -> text of each added token.
        special: id -> text of the special ones.
        date: today's date, if the template has asked for it.

    Args:
        end_ids: tokens that end a turn. Those that are not added tokens do not separate the text, and are ignored.
    """

    def __init__(self, tokenizer: Any, variables: Variables, end_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.added = {i: str(token) for i, token in added.items()}
        special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        self.special = {**dict(special), **{i: str(token) for i, token in added.items() if token.special}}
        self._ends = [self.added[i] for i in end_ids if i in self.added]
        self.exists = getattr(tokenizer, "chat_template", None) is not None
        self._began = datetime.now()
        self.date = ""
        self._variables = dict(variables)
        if self.uses("strftime_now"):  # a function of transformers
            self._variables = {"strftime_now": self._today, **variables}
        self._proven: dict[tuple[str, ...], Frame] = {}  # roles -> frame behind a turn
        self._frames: dict[str, Frame] = {}
        self._reads_parts = False  # the template leaves out a content that is a text, as LLaVA's do
        if self.exists and not self.frame([QUESTION]).pieces:
            self._reads_parts = True
            self._frames.clear()

    def _today(self, form: str) -> str:
        self.date = self._began.strftime(form)
        return self.date

    def uses(self, name: str) -> bool:
        """Return whether the template has a variable of this name."""
        source = self._tokenizer.get_chat_template(tools=[{}] if name == "tools" else None) if self.exists else ""
        return re.search(rf"\b{re.escape(name)}\b", source) is not None

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, generate: bool = True, more: Variables | None = None
    ) -> str:
        """Return the text of a conversation, which ends with the beginning of an answer if the template shall generate.

        `more` are further variables. Raises TemplateFailed.
        """
        variables = {**self._variables, **({"tools": [*tools]} if tools else {}), **(more or {})}
        messages = [*map(_with_part, messages)] if self._reads_parts else [*messages]
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=generate, tokenize=False, **variables
            )
        except Exception as error:  # a template is a program and may raise any error
            raise TemplateFailed(f"the chat template fails ({error})") from error
        return text

    @cached_property
    def prompt(self) -> str:
        """Return the prompt of one question, `QUESTION`. Raises TemplateFailed."""
        return self.render([QUESTION])

    @cached_property
    def opening(self) -> str:
        """Return the beginning of an answer, with which a prompt ends; empty if the answer follows the question."""
        closed = self.render([QUESTION], generate=False)
        return self.prompt[len(os.path.commonprefix([self.prompt, closed])) :]

    @property
    def thinking(self) -> str:
        """Return the end of the opening from the beginning of a thought on, or nothing."""
        return "".join(self.opening.partition("<think>")[1:])

    def frame(self, messages: Sequence[Message], tools: Tools = ()) -> Frame:
        """Return the frame of the texts of messages, see `texts_of`. It depends on their roles and parts alone."""
        marks = map(MARK.format, count())
        marked = [{"role": m["role"], "content": _with_marks(m["content"], marks)} for m in messages]
        if tools:  # Each row may have other ones, so the frame is not kept.
            return self._frame(marked, tools)
        key = repr(marked)
        if key not in self._frames:
            self._frames[key] = self._frame(marked)
        return self._frames[key]

    def _frame(self, marked: Sequence[Message], tools: Tools = ()) -> Frame:
        try:
            text = self.render(marked, tools)
        except TemplateFailed:  # It may still render the row, and is judged by the texts then.
            return Frame()
        marks = [message["content"] for message in texts_of(marked)]
        dropped = tuple(i for i, mark in enumerate(marks) if mark not in text)
        return Frame(_pieces(text, marks), dropped)

    def split(self, messages: Sequence[Message]) -> tuple[str, str, str]:
        """Return the text before the end token of the answer, whose text is `ANSWER`; that token; the text behind it.

        Raises DataError: the template fails; the answer does not occur once; none of the end tokens follows it.
        """
        text = self.render(messages)
        front, *rest = text.split(ANSWER)
        if len(rest) != 1:
            raise DataError(f"the chat template writes the assistant's text {len(rest)} times")
        behind = rest[0].lstrip()  # Some templates write a space in front of the end, and models learn to.
        if not (end := self._end_of(behind)):
            problem = f"the assistant's turn ends with {rest[0][:40]!r}"
            raise DataError(f"{problem}, which begins with no token of the model or rollout.stop_token_ids")
        return text[: len(text) - len(behind)], end, behind[len(end) :]

    def frame_behind(self, roles: Sequence[str]) -> Frame:
        """Return the frame of messages with these roles behind a turn. Its first piece begins behind the end token.

        Raises DataError: the text is another one in other conversations, or its tokens are; see also `split`.
        """
        key = tuple(roles)
        if key not in self._proven:
            self._proven[key] = self._frame_behind(key)
        return self._proven[key]

    def _frame_behind(self, roles: tuple[str, ...]) -> Frame:
        marks = [MARK.format(i) for i in range(len(roles))]
        messages = list(map(said, roles, marks))
        front, end, delta = self.split([*START, *messages])
        for history in _histories():
            try:
                other = self.split([*history, *messages])
            except TemplateFailed:  # It does not have this history, so no trajectory has it.
                continue
            if other[1:] != (end, delta):
                problem = f"{end + delta!r} behind a turn, and {other[1] + other[2]!r} in another conversation"
                raise DataError(f"the chat template writes {problem}")
        last = self.render(START, generate=False).partition(ANSWER)[2]
        if self._end_of(last.lstrip()) != end:  # It belongs to the message that follows, or to turns of the history.
            raise DataError(f"a turn ends with {end!r} if a message follows, and with {last!r} if none does")
        pieces = _pieces(delta, marks)
        if not pieces:
            raise DataError(f"the chat template leaves out or moves a message: it writes {delta!r}")
        asked = "".join(self.frame([QUESTION]).pieces[-1:])
        if roles[-1] == "user" and pieces[-1] != asked:
            raise DataError(f"behind the first question the template writes {asked!r}, and {pieces[-1]!r} later")
        before = self._tokens(front + end)
        for fill in _FILLS:
            delta = Frame(pieces).around([fill] * len(roles))
            if self._tokens(front + end + delta) != before + self.encode(end, delta):
                raise DataError(f"the tokens of {end + delta!r} depend on the text in front of it")
        ids = self.encode(end, Frame(pieces).around(["4"] * len(roles)))
        written = "".join(pieces).removesuffix(self.thinking)  # An observation may quote a model's thinking.
        watched = {*self.special, *(i for i in ids if (text := self.added.get(i, "").strip()) and text in written)}
        return Frame(pieces, (), end, frozenset(watched), tuple(i for i in ids if i in watched))

    def encode(self, end: str, delta: str) -> list[int]:
        """Return the ids behind the end token. It stands in front, since it may absorb white space that follows it.

        Raises DataError if the tokenizer does not separate the end token.
        """
        first, *ids = self._tokens(end + delta)
        if self.added.get(first) != end:
            raise DataError(f"the tokens of {end + delta[:40]!r} do not begin with {end!r}")
        return ids

    def _end_of(self, text: str) -> str:
        return max((end for end in self._ends if text.startswith(end)), key=len, default="")

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_part(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def texts_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a message for each text: the message itself, or one for each of its parts that are texts."""
    texts = list[dict[str, Any]]()
    for message in messages:
        content = message["content"]
        contents = [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
        texts += [{**message, "content": text} for text in contents]
    return texts


def forms_of(message: Message) -> list[str]:
    """Return the forms in which templates write the text of a message."""
    text = message["content"]
    forms = [text, text.strip(), text.strip("\n")]
    if message["role"] == "assistant":
        forms.append(text.rpartition("</think>")[2].strip())  # without the thoughts of earlier turns
    if message["role"] == "tool":
        forms += [json.dumps(form, ensure_ascii=False)[1:-1] for form in forms[:2]]
    return forms


def _with_marks(content: str | list[dict[str, str]], marks: Iterator[str]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return next(marks)
    return [{**part, "text": next(marks)} if "text" in part else part for part in content]


def _pieces(text: str, marks: Sequence[str]) -> tuple[str, ...]:
    """Return what stands around the marks in a text; nothing if they do not occur once each, and in this order."""
    return tuple(_MARKS.split(text)) if _MARKS.findall(text) == [*marks] else ()


def _histories() -> Iterator[list[dict[str, Any]]]:
    """Yield conversations that end with the answer: with a system message, earlier turns, a call, and thinking."""
    earlier = [said("user", "y"), said("assistant", _CALL)]
    yield [said("system", "s"), *START]
    yield [*earlier, *START]
    yield [*earlier, said("tool", "w"), START[1]]
    yield [QUESTION, said("assistant", THOUGHT + _CALL + ANSWER)]
