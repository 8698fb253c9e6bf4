"""Read what a dataset has behind a prompt, as one trajectory: ids, and which of them the student learns.

One response is a trajectory of one turn. A whole conversation (data.messages_key) has a turn for each message of the
assistant, with its end token. The messages between the turns are rendered as those of an environment. A text of the
assistant that is not learned (`weight: 0`) is read like them.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any

import numpy as np

from gkd.config.schema_sections import DataConfig
from gkd.data.chat_delta import ChatDelta
from gkd.data.conversation import Setting, Turn, quoted
from gkd.data.render import PromptRenderer, Rendered
from gkd.data.template import ANSWER, QUESTION, START, TAG, ChatTemplate, Message, TemplateFailed, Tools, said
from gkd.errors import ConfigError, DataError
from gkd.log import get_logger

log = get_logger("data")

_THOUGHT_TAG = re.compile(r"[<\[]/?[\w:]*(?:think|thought|reason)\w*[>\]]", re.IGNORECASE)
_NO_THOUGHTS = "set data.chat_template_kwargs: {enable_thinking: false} if the template has it"
_UNENDED = "%d of %d responses never end the %s that the template opens. Fix: write %s into the responses, or %s"
_SHOWN = 60  # characters of a text in front of the place where another one differs
_TAIL = 200  # characters of a prompt: more than any template writes at the beginning of an answer


class ResponseReader:
    """Return the tokens of the turns behind a prompt, which end with one of `ends`. They come from `setting`."""

    def __init__(
        self, config: DataConfig, tokenizer: Any, ends: Sequence[int], renderer: PromptRenderer, setting: Setting
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._ends = ends
        self._limit = config.max_response_length
        self._setting = setting
        self._thoughts = defaultdict[str, list[bool]](list)  # tag that ends prompts -> whether each answer ends it
        self._answers = cache(partial(AnswerTexts, renderer.template))
        # The first row with messages between its turns needs it: not all templates can continue a turn.
        self._delta = cache(partial(ChatDelta, tokenizer, config.chat_template_kwargs, ends, setting=setting))

    def read(self, prompt: Rendered, turns: Sequence[Turn], where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the response, [R] int32, and which of its tokens are the assistant's own, [R] bool.

        What exceeds the limit is cut off; the response then ends with an own token that need not be an end token.
        Raises ConfigError: an answer repeats the end of its prompt, has no tokens, or an end token before its end; the
        template does not write it behind its prompt, or cannot write a message between two turns.
        """
        pieces: list[tuple[list[int], bool]] = []
        history: list[dict[str, Any]] = []
        for is_turn, group in groupby(turns, lambda turn: turn[0]["role"] == "assistant"):
            messages, flags = map(list, zip(*group, strict=True))
            try:
                if is_turn:
                    ids = self._turn(prompt, history, messages, where)
                else:
                    ids = self._between(prompt, history, messages, where, pieces[-1][0][-1])
            except DataError as error:
                problem = f"the conversation of {where} cannot be read: {error}"
                raise ConfigError(*self._setting, problem, "correct or remove the row.") from error
            pieces.append((ids, flags[0]))
            history = [*history[:1], *messages]  # A short history, as that of `ChatDelta`, makes the time linear.
        response = np.concatenate([part for part, _ in pieces]).astype(np.int32)[: self._limit]
        own_mask = np.repeat([is_own for _, is_own in pieces], [len(part) for part, _ in pieces])[: self._limit]
        n = int(np.flatnonzero(own_mask)[-1]) + 1
        return response[:n], own_mask[:n]

    def read_ids(self, value: Any, text: Any, where: str, column: str) -> np.ndarray:
        """Return a response whose ids stand in a row, [R] int32, R <= the limit: nothing is tokenized.

        Raises:
            ConfigError: they are not ids of this tokenizer, have an end token before their end, or stand for another
                text than the row has.
        """
        n_vocab = len(self._tokenizer)
        if not (isinstance(value, list) and value and all(type(i) is int and 0 <= i < n_vocab for i in value)):
            problem = f"{where} has {quoted(value)}, expected a list of token ids below {n_vocab}."
        elif any(i in self._ends for i in value[:-1]):
            problem = f"{where} has an end-of-sequence token before the end of its ids."
        elif (written := answer_text(self._tokenizer, value, self._ends)) != text:
            problem = f"the ids of {where} stand for {quoted(written)}, and its text is {quoted(text)}."
        else:
            return np.asarray(value, np.int32)[: self._limit]
        fix = "correct the row, or remove or rename the column: then the text is tokenized."
        raise ConfigError(self._setting[0], column, problem, fix)

    def log(self) -> None:
        """Warn about answers that never end the thoughts that their prompt begins."""
        for tag, ended in sorted(self._thoughts.items()):
            if not all(ended):
                log.warning(_UNENDED, ended.count(False), len(ended), tag, _end_of_thought(tag), _NO_THOUGHTS)

    def _between(self, prompt: Rendered, history: list[Any], messages: list[Any], where: str, end: int) -> list[int]:
        if end != self._delta().end_id:
            raise DataError(f"the turn in front of {quoted(messages[0])} has another end than the template writes.")
        plain = [said(message["role"], message["content"]) for message in messages]  # without its time, for example
        if plain != messages:
            texts = [self._renderer.continued(prompt, [*history, *form], where).text for form in (plain, messages)]
            plain = plain if texts[0] == texts[1] else messages
        return self._delta().ids(plain).tolist()

    def _turn(self, prompt: Rendered, history: list[Any], messages: Sequence[Message], where: str) -> list[int]:
        """Return the tokens of an answer and its end behind a prompt, as the template writes them: see `AnswerTexts`.

        Without an end token of the template, the tokenizer's is appended. One that the answer has stays. Tokens of the
        prompt do not change: if they would merge with white space of the answer, it is tokenized alone.
        """
        if len(messages) > 1:
            raise DataError("it has two messages of the assistant in a row.")
        text = messages[0]["content"]
        prompt = self._renderer.continued(prompt, history, where) if history else prompt
        if again := self._begins_again(prompt.text, text):
            problem = f"a response of {where} begins with {again!r}, with which its prompt ends: {quoted(text)}."
            raise ConfigError(*self._setting, problem, "remove it from the text, because the chat template writes it.")
        added = self._renderer.template.added
        names = {added[i]: i for i in self._ends if i in added}
        end_text = max((name for name in names if text.endswith(name)), key=len, default="")
        text = text.removesuffix(end_text)
        answer, behind = self._answer(prompt, text, where)
        places = ((behind.find(name), -len(name), name) for name in names if name in behind)
        end_start, _, end = min(places, default=(0, 0, ""))
        ids = self._ids_behind(prompt.text, answer + behind[:end_start])
        if not (text.strip() and answer and ids):
            raise ConfigError(*self._setting, f"the response of {where} has no tokens.", "correct or remove the row.")
        if any(token in self._ends for token in ids[:-1]):
            problem = f"the response of {where} contains an end-of-sequence token before its end: {quoted(text)}."
            fix = "remove it from the text, or from rollout.stop_token_ids if it is one of them."
            raise ConfigError(*self._setting, problem, fix)
        if self._renderer.image_token in ids:
            problem = f"the response of {where} has the token of an image, and no image: {quoted(text)}."
            raise ConfigError(*self._setting, problem, "remove it from the text.")
        if ids[-1] not in self._ends:
            eos = self._tokenizer.eos_token_id
            ids.append(names.get(end_text or end, self._ends[0] if eos is None else eos))
        return ids

    def _answer(self, prompt: Rendered, text: str, where: str) -> tuple[str, str]:
        """Return an answer and the text behind it; count whether it ends the thoughts that its prompt begins."""
        if not self._renderer.applies:
            return text, ""
        tag = _opened_thought(prompt.text)
        try:
            answer, behind = self._answers().find(prompt.text, prompt.messages, prompt.tools, text)
        except DataError as error:
            problem = f"the chat template does not write the response of {where} behind its prompt: {error}."
            thinks = f"end the thoughts with {_end_of_thought(tag)} in the response, or {_NO_THOUGHTS}." if tag else ""
            raise ConfigError(*self._setting, problem, thinks or "write it in the template's form.") from error
        if tag:
            self._thoughts[tag].append(_end_of_thought(tag) in answer)
        return answer, behind

    def _ids_behind(self, prompt: str, text: str) -> list[int]:
        """Return the tokens of a text. Some tokenizers put a space in front of one that stands alone."""
        tail = prompt[-_TAIL:] if self._renderer.applies else ""
        encode = partial(self._tokenizer, add_special_tokens=False)
        front, ids = (list(encode(part)["input_ids"]) for part in (tail, tail + text))
        return ids[len(front) :] if ids[: len(front)] == front else list(encode(text)["input_ids"])

    def _begins_again(self, prompt: str, response: str) -> str:
        """Return the end of a prompt, such as <think>, if the template writes it and a response repeats it; or "".

        A response does not think behind thoughts that the prompt has ended.
        """
        tail = prompt.rstrip()[-_TAIL:] if self._renderer.applies else ""
        text = response.lstrip()
        ends = (tail[tag.start() :] for tag in TAG.finditer(tail))
        ended = next((end for end in ends if text.startswith(end)), "")
        return ended or ("<think>" if tail.endswith("</think>") and text.startswith("<think>") else "")


def answer_text(tokenizer: Any, ids: Sequence[int], ends: Sequence[int]) -> str:
    """Return the text of a response, with special tokens, but without the end token at its end."""
    own = ids[:-1] if ids[-1] in ends else ids
    text: str = tokenizer.decode(own, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


class AnswerTexts:
    """Find the text of an answer behind its prompt: what the template writes in the conversation with the answer.

    A prompt ends with a header, such as <|im_start|>assistant, and what begins the answer, such as <think>.
    The shortest conversation counts if the template moves the system's text to the last message, so that none goes on
    from this prompt. The answer's own text counts if the template drops its thoughts, if it begins as the template
    begins answers, or if a prompt that came as a text has begun the answer in another way.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        prompt = template.prompt
        opening = template.opening or prompt.partition(QUESTION["content"])[2]
        header = _THOUGHT_TAG.split(opening)[0]
        self._header = header.rstrip() or header
        self._front = prompt[: len(prompt) - len(opening) + len(self._header)]
        written, _, self._behind = template.render(START, generate=False).partition(ANSWER)
        is_behind = written.startswith(self._front)
        self._lead = written.removeprefix(self._front) if is_behind else ""  # between header and answer

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
        start = max(0, len(os.path.commonprefix([prompt, texts[0]])) - _SHOWN)
        written = texts[0][start:].replace(QUESTION["content"], "...")
        raise DataError(f"the prompt ends with {quoted(prompt[start:])}, and with the answer it is {quoted(written)}")

    def _has_form(self, answer: str, begun: str) -> bool:
        """Return whether an answer begins as the template begins answers: with a channel, or unfinished thoughts."""
        tag = TAG.search(self._lead)
        first = self._lead[: tag.end() if tag else None].strip()
        thinks = _THOUGHT_TAG.fullmatch(first)
        begins = ("" if thinks else begun.lstrip()) + answer.lstrip()
        return bool(first) and begins.startswith(first) and not (thinks and _end_of_thought(first) in answer)


def _opened_thought(prompt: str) -> str:
    """Return the tag with which a prompt begins thoughts; empty if it begins none."""
    tail = prompt.rstrip()
    last = tail[max(tail.rfind("<"), tail.rfind("["), 0) :]
    return last if _THOUGHT_TAG.fullmatch(last) and "/" not in last else ""


def _end_of_thought(tag: str) -> str:
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
    segments = [part.strip() for part in _THOUGHT_TAG.split(answer)]
    ends = {tag for tag in _THOUGHT_TAG.findall(answer) if "/" in tag}
    is_whole = text.rstrip().endswith(segments[-1]) and all(part in text for part in segments)
    if is_whole and written.startswith(begun) and all(text.count(end) == answer.count(end) for end in ends):
        return text
    is_same = written.strip() == answer.strip()
    drops = bool(ends) and "/" not in "".join(_THOUGHT_TAG.findall(begun)) and _words(written) == segments[-1]
    return answer if (is_same or drops) and written.startswith(_THOUGHT_TAG.split(begun)[0]) else None
