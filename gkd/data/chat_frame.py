"""Prove what a chat template writes behind a turn of the assistant: the end token, and pieces around other messages.

`gkd.data.chat_delta` appends that text to trajectories. This is right only if the template writes it in every
conversation, and if its tokens are those that it has in the whole text. Conversations with marks as texts prove both.
`AnswerTexts` finds what the template writes for an answer of a dataset.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gkd.data.conversation import quoted
from gkd.errors import ConfigError, DataError

Message = Mapping[str, Any]
Form = Callable[[str], str]
# messages, tools, whether an answer begins behind them; ConfigError: the template fails
Render = Callable[[Sequence[Message], tuple[Any, ...], bool], str]

ANSWER, MARK = "\ue000answer\ue001", "\ue000{}\ue001"  # characters for private use, which no template changes
WHY = "\ue000why\ue001"
THOUGHT = f"<think>\n{WHY}\n</think>\n\n"
_THOUGHT_TAG = re.compile(r"[<\[]/?[\w:]*(?:think|thought|reason)\w*[>\]]", re.IGNORECASE)
TAG = re.compile(r"</?[^\s<>]+>|\[/?[A-Z_]+\]")  # markers of templates
_SHOWN = 60  # characters of a text in front of the place where another one differs
_CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
_PROBE = ' \n A"b\\<é>🙂\tz\n '  # a text that shows what a template changes
_FORMS: tuple[Form, ...] = (  # Templates write a text in one of them.
    lambda text: text,
    lambda text: text.strip(),
    lambda text: text.strip("\n"),
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
)
_FILLS = ("4", " 4\n", "\n\n", "é🙂", "")  # texts of messages in the proof on tokens


def said(role: str, text: str) -> dict[str, str]:
    """Return a message."""
    return {"role": role, "content": text}


def in_parts(message: Message) -> Message:
    """Return a message with its text as a part: some templates, as LLaVA's, leave out any other text."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


QUESTION = said("user", "x")
START = (QUESTION, said("assistant", ANSWER))


class TemplateFailed(DataError):
    """The chat template raised an error."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Holds what the template writes around the texts of certain messages.

    Attributes:
        end: text of the end token.
        pieces: one more than there are messages. The first one begins behind the end token.
        watched: ids of special tokens, and of added tokens that the pieces have.
        order: watched ids of the pieces. Those of the texts would come between them.
    """

    end: str
    pieces: tuple[str, ...]
    watched: frozenset[int]
    order: tuple[int, ...]

    def around(self, texts: Sequence[str]) -> str:
        """Return the delta of messages with these texts."""
        return "".join(map(str.__add__, self.pieces, [*texts, ""]))


class ChatFrames:
    """Find and prove the frames of one tokenizer's template.

    Attributes:
        added: id -> text of each added token.
        special: ids of the special ones.
        prompt: a first prompt.
        opening: the beginning of an answer, with which it ends.
        thinking: the end of the opening from the beginning of a thought on, or empty.
        proven: roles -> frame, of those that were asked for.

    Args:
        variables: of the template, with tools.
        end_ids: tokens that end a turn. Those that are not added tokens do not separate the text, and are ignored.

    Raises:
        TemplateFailed: the template writes no prompt.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any], end_ids: Sequence[int]) -> None:
        self._tokenizer, self._variables = tokenizer, variables
        added = tokenizer.added_tokens_decoder
        self.added: dict[int, str] = {i: str(token) for i, token in added.items()}
        self.special = frozenset({*(i for i, token in added.items() if token.special), *tokenizer.all_special_ids})
        self._ends = [self.added[i] for i in end_ids if i in self.added]
        self._reads_parts = False
        self._reads_parts = ANSWER not in self.render([said("user", ANSWER)])
        self.prompt = self.render([QUESTION])
        closed = self.render([QUESTION], generate=False)
        self.opening = self.prompt[len(os.path.commonprefix([self.prompt, closed])) :]
        self.thinking = "".join(self.opening.partition("<think>")[1:])
        self.proven: dict[tuple[str, ...], Frame] = {}

    def render(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        """Return the text of a conversation. Raises TemplateFailed."""
        messages = [*map(in_parts, messages)] if self._reads_parts else [*messages]
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=generate, tokenize=False, **self._variables
            )
        except Exception as error:  # a template is a program and may raise any error
            raise TemplateFailed(f"the chat template fails ({error})") from error
        return text

    def split(self, messages: Sequence[Message]) -> tuple[str, str, str]:
        """Return the text before the end token of the answer, whose text is `ANSWER`; that token; the text behind it.

        Raises:
            DataError: the template fails; the answer does not occur once; none of the end tokens follows it.
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

    def encode(self, end: str, delta: str) -> list[int]:
        """Return the ids behind the end token. It stands in front, since it may absorb white space that follows it.

        Raises:
            DataError: the tokenizer does not separate the end token.
        """
        first, *ids = self._tokens(end + delta)
        if self.added.get(first) != end:
            raise DataError(f"the tokens of {end + delta[:40]!r} do not begin with {end!r}")
        return ids

    def frame(self, roles: Sequence[str]) -> Frame:
        """Return the frame of messages with these roles. Raises DataError if it cannot be proven."""
        key = tuple(roles)
        if key not in self.proven:
            self.proven[key] = self._prove(key)
        return self.proven[key]

    def form(self, role: str) -> Form:
        """Return the form in which the template writes texts of a role. Raises DataError if there is none."""
        frame = self.frame([role])
        found = self.split([*START, said(role, _PROBE)])[2]
        form = next((form for form in _FORMS if frame.around([form(_PROBE)]) == found), None)
        if form is None:
            raise DataError(f"the chat template changes a text: it writes {_PROBE!r} as {found!r}")
        return form

    def _prove(self, roles: tuple[str, ...]) -> Frame:
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
        if re.findall("|".join(marks), delta) != marks:
            raise DataError(f"the chat template leaves out or moves a message: it writes {delta!r}")
        pieces = tuple(re.split("|".join(marks), delta))
        asked = self.render([said("user", marks[0])]).partition(marks[0])[2]
        if roles[-1] == "user" and pieces[-1] != asked:
            raise DataError(f"behind the first question the template writes {asked!r}, and {pieces[-1]!r} later")
        found = self._ids_of(front, Frame(end, pieces, frozenset(), ()))
        written = "".join(pieces).removesuffix(self.thinking)  # An observation may quote a model's thinking.
        watched = self.special | {i for i in found if (text := self.added.get(i, "").strip()) and text in written}
        return Frame(end, pieces, watched, tuple(i for i in found if i in watched))

    def _ids_of(self, front: str, frame: Frame) -> list[int]:
        """Return the ids of a delta with short texts. Raises DataError if any depend on the text in front of it."""
        before, n = self._tokens(front + frame.end), len(frame.pieces) - 1
        for fill in _FILLS:
            delta = frame.around([fill] * n)
            if self._tokens(front + frame.end + delta) != before + self.encode(frame.end, delta):
                raise DataError(f"the tokens of {frame.end + delta!r} depend on the text in front of it")
        return self.encode(frame.end, frame.around([_FILLS[0]] * n))

    def _end_of(self, text: str) -> str:
        return max((end for end in self._ends if text.startswith(end)), key=len, default="")

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _histories() -> Iterator[list[dict[str, str]]]:
    """Yield conversations that end with the answer: with a system message, earlier turns, a call, and thinking."""
    earlier = [said("user", "y"), said("assistant", _CALL)]
    yield [said("system", "s"), *START]
    yield [*earlier, *START]
    yield [*earlier, said("tool", "w"), START[1]]
    yield [QUESTION, said("assistant", THOUGHT + _CALL + ANSWER)]


class AnswerTexts:
    """Find the text of an answer behind its prompt: what the template writes in the conversation with the answer.

    The shortest conversation counts if the template moves the system's text to the last message, so that none goes on
    from this prompt. The answer's own text counts if the template drops its thoughts, if it begins as the template
    begins answers, or if a prompt that came as a text has begun the answer in another way.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        asked = said("user", MARK.format(0))
        prompt, closed = (render([asked], (), generate) for generate in (True, False))
        opening = prompt[len(os.path.commonprefix([prompt, closed])) :] or prompt.partition(asked["content"])[2]
        header = _THOUGHT_TAG.split(opening)[0]
        self._header = header.rstrip() or header
        front = prompt[: len(prompt) - len(opening) + len(self._header)]
        written, _, self._behind = render([asked, said("assistant", ANSWER)], (), False).partition(ANSWER)
        self._lead = written.removeprefix(front) if written.startswith(front) else ""  # between header and answer
        self._shortest = [asked], (), front

    def find(self, prompt: str, messages: Sequence[Message], tools: tuple[Any, ...], answer: str) -> tuple[str, str]:
        """Return the answer's text, and the text behind it, in which an end token may be.

        Without messages the prompt came as a text. Raises DataError: the template does not write the answer behind it.
        """
        before, header, begun = prompt.rpartition(self._header) if self._header else (prompt, "", "")
        is_known = bool(before or header) and not (messages and _words(begun))  # the header of this prompt's answer
        begun = begun if is_known else ""
        if self._has_form(answer, begun) and not begun.strip():
            answer = self._lead[: len(self._lead) - len(self._lead.lstrip())].removeprefix(begun) + answer.lstrip()
        if self._has_form(answer, begun) or not (is_known or messages):
            return answer, self._behind
        histories = [(messages, tools, prompt.removesuffix(begun))] if messages else []
        histories += [self._shortest] if is_known else []
        texts = list[str]()
        for history, offered, front in histories:
            for message in _messages(answer, begun):
                try:
                    texts.append(self._render([*history, message], offered, False))
                except ConfigError as error:
                    texts.append(error.problem)
                if texts[-1].startswith(front) and texts[-1].endswith(self._behind):
                    written = texts[-1].removeprefix(front).removesuffix(self._behind)
                    if (found := _answer_in(written, begun, answer)) is not None:
                        return found, self._behind
        if not messages and _words(begun):
            return answer, self._behind
        at = max(0, len(os.path.commonprefix([prompt, texts[0]])) - _SHOWN)
        written = texts[0][at:].replace(MARK.format(0), "...")
        raise DataError(f"the prompt ends with {quoted(prompt[at:])}, and with the answer it is {quoted(written)}")

    def _has_form(self, answer: str, begun: str) -> bool:
        """Return whether an answer begins as the template begins answers: with a channel, or unfinished thoughts."""
        tag = TAG.search(self._lead)
        first = self._lead[: tag.end() if tag else None].strip()
        thinks = _THOUGHT_TAG.fullmatch(first)
        begins = ("" if thinks else begun.lstrip()) + answer.lstrip()
        return bool(first) and begins.startswith(first) and not (thinks and end_of_thought(first) in answer)


def opened_thought(prompt: str) -> str:
    """Return the tag with which a prompt begins thoughts; empty if it begins none."""
    tail = prompt.rstrip()
    last = tail[max(tail.rfind("<"), tail.rfind("["), 0) :]
    return last if _THOUGHT_TAG.fullmatch(last) and "/" not in last else ""


def end_of_thought(tag: str) -> str:
    """Return the tag that ends the thoughts which another one begins."""
    return f"{tag[0]}/{tag[1:]}"


def _words(text: str) -> str:
    return _THOUGHT_TAG.sub("", text).strip()


def _messages(answer: str, begun: str) -> Iterator[Message]:
    """Yield messages that stand for an answer: templates read its thoughts in the text, or in a key."""
    yield said("assistant", answer)
    if begun.strip():
        yield said("assistant", begun.lstrip() + answer)
    if end := next((tag for tag in _THOUGHT_TAG.finditer(answer) if "/" in tag[0]), None):
        yield {**said("assistant", answer[end.end() :]), "reasoning_content": _words(answer[: end.start()])}


def _answer_in(written: str, begun: str, answer: str) -> str | None:
    """Return an answer as it is written behind its beginning, or its own text if only thoughts are lacking; or None."""
    found = written.removeprefix(begun)
    parts = [part.strip() for part in _THOUGHT_TAG.split(answer)]
    ends = {tag for tag in _THOUGHT_TAG.findall(answer) if "/" in tag}
    is_whole = found.rstrip().endswith(parts[-1]) and all(part in found for part in parts)
    if is_whole and written.startswith(begun) and all(found.count(end) == answer.count(end) for end in ends):
        return found
    is_same = written.strip() == answer.strip()
    drops = bool(ends) and "/" not in "".join(_THOUGHT_TAG.findall(begun)) and _words(written) == parts[-1]
    return answer if (is_same or drops) and written.startswith(_THOUGHT_TAG.split(begun)[0]) else None
