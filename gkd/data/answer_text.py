"""What a chat template writes for an answer of a dataset behind its prompt: the tokens that the student learns."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from gkd.data.conversation import quoted
from gkd.data.template import ANSWER, QUESTION, START, TAG, ChatTemplate, Message, TemplateFailed, Tools, said
from gkd.errors import DataError

_THOUGHT_TAG = re.compile(r"[<\[]/?[\w:]*(?:think|thought|reason)\w*[>\]]", re.IGNORECASE)
_SHOWN = 60  # characters of a text in front of the place where another one differs


class AnswerTexts:
    """Find the text of an answer behind its prompt: what the template writes in the conversation with the answer.

    A prompt ends with a header, such as <|im_start|>assistant. Behind it it may have begun the answer, as with <think>.

    The shortest conversation counts if the template moves the system's text to the last message, so that none goes on
    from this prompt. The answer's own text counts if the template drops its thoughts, if it begins as the template
    begins answers, or if a prompt that came as a text has begun the answer in another way.

    Raises:
        TemplateFailed: the template writes no question or answer.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        prompt = template.prompt
        opening = template.opening or prompt.partition(QUESTION["content"])[2]
        header = _THOUGHT_TAG.split(opening)[0]
        self._header = header.rstrip() or header
        self._front = prompt[: len(prompt) - len(opening) + len(self._header)]
        written, _, self._behind = template.render(START, generate=False).partition(ANSWER)
        # between header and answer
        self._lead = written.removeprefix(self._front) if written.startswith(self._front) else ""

    def find(self, prompt: str, messages: Sequence[Message], tools: Tools, answer: str) -> tuple[str, str]:
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
        histories: list[tuple[Sequence[Message], Tools, str]] = []
        if messages:
            histories.append((messages, tools, prompt.removesuffix(begun)))
        if is_known:
            histories.append(([QUESTION], (), self._front))
        texts = list[str]()
        for history, offered, front in histories:
            for message in _messages(answer, begun):
                try:
                    texts.append(self._template.render([*history, message], offered, generate=False))
                except TemplateFailed as error:
                    texts.append(str(error))
                if texts[-1].startswith(front) and texts[-1].endswith(self._behind):
                    written = texts[-1].removeprefix(front).removesuffix(self._behind)
                    if (text := _answer_in(written, begun, answer)) is not None:
                        return text, self._behind
        if not messages and _words(begun):
            return answer, self._behind
        at = max(0, len(os.path.commonprefix([prompt, texts[0]])) - _SHOWN)
        written = texts[0][at:].replace(QUESTION["content"], "...")
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
    text = written.removeprefix(begun)
    parts = [part.strip() for part in _THOUGHT_TAG.split(answer)]
    ends = {tag for tag in _THOUGHT_TAG.findall(answer) if "/" in tag}
    is_whole = text.rstrip().endswith(parts[-1]) and all(part in text for part in parts)
    if is_whole and written.startswith(begun) and all(text.count(end) == answer.count(end) for end in ends):
        return text
    is_same = written.strip() == answer.strip()
    drops = bool(ends) and "/" not in "".join(_THOUGHT_TAG.findall(begun)) and _words(written) == parts[-1]
    return answer if (is_same or drops) and written.startswith(_THOUGHT_TAG.split(begun)[0]) else None
