"""Render the messages of an environment behind a generated turn: the token ids that continue a trajectory.

ids(t+1) = ids(t) + generated ids + delta(messages). Generated ids stay as they were sampled, with their end token. The
delta is what the chat template writes from that token to the next answer. It is rendered in a short conversation, whose
answer is a mark. This is right only for a template that writes the same delta in every conversation. So each sequence
of roles is proven before its first use, on text and on tokens, in conversations with other histories.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from gkd.data.conversation import Conversation, quoted
from gkd.data.render import PromptRenderer
from gkd.errors import ConfigError, DataError

Message = Mapping[str, Any]
_ANSWER, _MARK = "\ue000answer\ue001", "\ue000{}\ue001"  # characters for private use, which no template changes
_PROBE = ' \n a"b\\<é>🙂\tz\n '  # a text that shows what a template changes
_FORMS: tuple[Callable[[str], str], ...] = (  # in which templates write a text
    lambda text: text,
    lambda text: text.strip(),
    lambda text: text.strip("\n"),
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
)
_FILLS = ("4", " 4\n", "\n\n", "é🙂", "")  # texts of messages in the proof on tokens
_SHORTEST_LINE = 4  # characters
_TAG = re.compile(r"</?[^\s<>]+>|\[/?[A-Z_]+\]")


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


_START = [_said("user", "x"), _said("assistant", _ANSWER)]
_THOUGHT = "<think>\nwhy\n</think>\n\n"


class _Failed(DataError):
    """The template raised an error."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Holds the end token's text, the pieces around the texts of certain messages, and the ids that these must keep."""

    end: str
    pieces: tuple[str, ...]  # one more than there are messages; the first one begins behind the end token
    watched: frozenset[int]  # special tokens, and added ones of the pieces
    order: tuple[int, ...]  # the watched ids of the pieces


class ChatDelta:
    """Return the delta of messages, for one tokenizer.

    Attributes:
        roles: of "tool" and "user", those that the template writes correctly.
        remark: one sentence on what the template would change in earlier turns, which here stay; or empty.

    Args:
        variables: data.chat_template_kwargs.
        end_ids: tokens that end a turn: of the model, and rollout.stop_token_ids.
        tools: schemas that the environment offers; the first prompt has them.
        environment: rollout.environment, for errors.

    Raises:
        ConfigError: there is no template; it writes no role, or with `tools` not the role tool, so that the ids are those
            of its own text; it leaves out a tool; it does not use a variable.
    """

    def __init__(
        self,
        tokenizer: Any,
        variables: dict[str, Any],
        end_ids: Sequence[int],
        tools: tuple[dict[str, Any], ...] = (),
        *,
        environment: str,
    ) -> None:
        self._tokenizer, self._end_ids = tokenizer, frozenset(end_ids)
        self._variables = {**variables, "tools": list(tools)} if tools else variables
        self._added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = frozenset({*special, *tokenizer.all_special_ids})
        self._setting = "rollout.environment", environment
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(*self._setting, "this tokenizer has no chat template.", "add one to the tokenizer.")
        renderer = PromptRenderer(tokenizer, "auto", variables)
        try:
            first = renderer.render(Conversation((_START[0],), tools=tools), self._setting, "the environment")
        except ConfigError as error:
            raise ConfigError(*self._setting, error.problem, "use another model, or correct its template.") from error
        self._prompt = first.text
        plain = self._render(_START[:1], generate=False)
        self._opening = self._prompt[len(os.path.commonprefix([self._prompt, plain])) :]
        self._frames: dict[tuple[str, ...], _Frame] = {}
        self._forms: dict[str, Callable[[str], str]] = {}
        self._reasons: dict[str, str] = {}
        for role in ("tool", "user"):
            try:
                self._forms[role] = self._form(role)
            except DataError as error:
                self._reasons[role] = str(error)
        self.roles = frozenset(self._forms)
        ends = {self._frames[role,].end for role in self.roles}
        if len(ends) != 1 or (tools and "tool" not in self.roles):
            reasons = [f"role {role}: {reason}" for role, reason in self._reasons.items()]
            problem = "; ".join(reasons) or f"the end token depends on the role that follows: {', '.join(sorted(ends))}"
            fix = "use a model whose template writes these messages and ends each turn with one of its end tokens."
            raise ConfigError(*self._setting, f"the chat template cannot continue a turn. {problem}.", fix)
        (self._end,) = ends
        self._end_id = next(i for i in end_ids if self._added.get(i) == self._end)
        self._marker = re.compile("|".join(re.escape(marker) for marker in {*self._markers()} if marker.strip()))
        self.remark = self._differences()

    def text(self, ids: np.ndarray) -> str:
        """Return a turn as the environment reads it: without its end token, and with other special tokens.

        Args:
            ids: [n] int, the generated ids.
        """
        own = ids[:-1] if len(ids) and int(ids[-1]) in self._end_ids else ids
        text: str = self._tokenizer.decode(own.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def follows(self, last_id: int) -> bool:
        """Return whether a turn that ended with this id can be continued: the delta begins behind one end token."""
        return last_id == self._end_id

    def ids(self, messages: Sequence[Message]) -> np.ndarray:
        """Return the delta, [n] int32: messages behind the end token of a turn, and the beginning of the next answer.

        Raises:
            DataError: there are no messages; a message has another role, content that is not text, invalid Unicode or
                a marker of the template; the template changes it.
        """
        if not messages:
            raise DataError("the environment returned no messages.")
        for i, message in enumerate(messages, 1):
            self._check(message, f"message {i} of the environment")
        frame = self._frame(messages)
        delta = self._split(_START, messages)[2]
        texts = [self._forms[message["role"]](message["content"]) for message in messages]
        if delta != _joined(frame.pieces, texts):
            raise DataError(f"the chat template changes the messages of the environment: it writes {quoted(delta)}.")
        ids = self._encode(frame.end, delta)
        # A normalizer can make a special token of characters that the search for markers does not know.
        if tuple(i for i in ids if i in frame.watched) != frame.order:
            raise DataError(f"a message of the environment becomes a special token: {quoted(delta)}.")
        return np.asarray(ids, dtype=np.int32)

    def _check(self, message: Message, name: str) -> None:
        """Raise DataError unless a message is one of texts only, without markers, in a role that works."""
        if not isinstance(message, Mapping) or not message.keys() >= {"role", "content"}:
            raise DataError(f"{name} is {quoted(message)}, expected role and content.")
        role = message["role"]
        if role not in self.roles:
            known = self._reasons.get(role, "") if isinstance(role, str) else ""
            why = f": {known}" if known else f", expected {' or '.join(sorted(self.roles))}"
            raise DataError(f"{name} has the role {quoted(role)}{why}.")
        for key, value in message.items():
            if not isinstance(value, str):
                raise DataError(f"{name} has {quoted(value)} as {key}, expected text.")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{name} is not valid Unicode at character {error.start + 1} of {key}.") from error
            if found := self._marker.search(value):
                problem = f"{name} holds {found[0]!r}, with which the model's template separates messages"
                raise DataError(f"{problem}: {quoted(value)}.")

    def _render(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=generate, tokenize=False, **self._variables
            )
        except Exception as error:  # a template is a program and may raise any error
            raise _Failed(f"the chat template fails ({error})") from error
        return text

    def _split(
        self, history: Sequence[Message], messages: Sequence[Message], *, generate: bool = True
    ) -> tuple[str, str, str]:
        """Return the text before the end token of the answer in `history`, that token, and the text behind it."""
        text = self._render([*history, *messages], generate=generate)
        front, *rest = text.split(_ANSWER)
        if len(rest) != 1:
            raise DataError(f"the chat template writes the assistant's text {len(rest)} times")
        behind = rest[0].lstrip()  # Some templates write a space in front of the end, and models learn to.
        ends = [self._added[i] for i in self._end_ids if behind.startswith(self._added.get(i, "\0"))]
        if not ends:
            problem = f"the assistant's turn ends with {rest[0][:40]!r}"
            raise DataError(f"{problem}, which begins with no token of the model or rollout.stop_token_ids")
        end = max(ends, key=len)
        return text[: len(text) - len(behind)], end, behind[len(end) :]

    def _encode(self, end: str, delta: str) -> list[int]:
        """Return the ids behind the end token. It stands in front, since it may absorb white space that follows it."""
        first, *ids = self._tokens(end + delta)
        if self._added.get(first) != end:
            raise DataError(f"the tokens of {quoted(end + delta)} do not begin with {end!r}")
        return ids

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _form(self, role: str) -> Callable[[str], str]:
        """Return the form in which the template writes texts of a role. Raises DataError if there is none."""
        before, after = self._frame([_said(role, "")]).pieces
        for roles in ((role, role), ("tool", "user")):
            with suppress(DataError):  # Such messages are refused when they come.
                self._frame([_said(each, "") for each in roles])
        found = self._split(_START, [_said(role, _PROBE)])[2]
        form = next((form for form in _FORMS if before + form(_PROBE) + after == found), None)
        if form is None:
            raise DataError(f"the chat template changes a text: it writes {_PROBE!r} as {found!r}")
        return form

    def _markers(self) -> Iterator[str]:
        """Yield texts by which the model tells messages apart, so that no message may hold them."""
        yield from (_ANSWER, *self._tokenizer.all_special_tokens)
        yield from (text for i, text in self._added.items() if i in self._special)
        for frame in self._frames.values():
            *pieces, last = frame.pieces
            for piece in (*pieces, last.removesuffix(self._opening)):
                found = {*_TAG.findall(piece), *(text for text in self._added.values() if text in piece)}
                # Some templates write names alone, such as "ASSISTANT:". A word of letters occurs in any text.
                lines = {line.strip() for line in piece.splitlines()} if not found else set()
                yield from {*found, *(line for line in lines if len(line) >= _SHORTEST_LINE and not line.isalnum())}

    def _frame(self, messages: Sequence[Message]) -> _Frame:
        """Return the frame of the messages' roles. Raises DataError if the proof fails."""
        roles = tuple(str(message["role"]) for message in messages)
        if any(len(message) > 2 for message in messages):  # Names and ids vary too much to keep their frames.
            return self._proven(messages)
        if roles not in self._frames:
            self._frames[roles] = self._proven(messages)
        return self._frames[roles]

    def _proven(self, messages: Sequence[Message]) -> _Frame:
        """Return the frame of messages, whose contents do not matter. Raises DataError if the proof fails."""
        marks = [_MARK.format(i) for i in range(len(messages))]
        marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        front, end, delta = self._split(_START, marked)
        for history in _histories(str(messages[0]["role"])):
            try:
                other = self._split(history, marked)
            except _Failed:  # The template does not have this history, so no trajectory has it.
                continue
            if other[1:] != (end, delta):
                problem = f"the template writes {delta!r} behind a turn, and {other[2]!r} in a longer conversation"
                raise DataError(problem)
        last = self._split(_START, (), generate=False)[1]
        if last != end:  # The token is a part of the message that follows, or is written only in the history.
            raise DataError(f"a turn ends with {end!r} when a message follows, and with {last!r} when none does")
        if re.findall("|".join(marks), delta) != marks:
            raise DataError(f"the chat template leaves out or moves a message: it writes {delta!r}")
        pieces = tuple(re.split("|".join(marks), delta))
        asked = self._render([_said("user", marks[0])]).partition(marks[0])[2]
        if messages[-1]["role"] == "user" and pieces[-1] != asked:
            raise DataError(f"the template writes {asked!r} behind the first message, and {pieces[-1]!r} behind others")
        before = self._tokens(front + end)
        for fill in _FILLS:
            filled = _joined(pieces, [fill] * len(marks))
            if self._tokens(front + end + filled) != before + self._encode(end, filled):
                raise DataError(f"the tokens of {end + filled!r} depend on the text in front of it")
        found = self._encode(end, _joined(pieces, ["4"] * len(marks)))
        watched = self._special | {i for i in found if self._added.get(i, "").strip()}
        return _Frame(end, pieces, watched, tuple(i for i in found if i in watched))

    def _differences(self) -> str:
        """Return what the template changes in earlier turns."""
        front = self._split(_START, [_said(sorted(self.roles)[-1], "m")])[0]
        lead, _, space = (
            front.removeprefix(self._prompt).partition(_ANSWER) if front.startswith(self._prompt) else ("",) * 3
        )
        lead = lead if not lead.strip() else ""
        is_open = self._opening.rfind("<think>") > self._opening.rfind("</think>")
        opened = self._opening[self._opening.rfind("<think>") :] if is_open else ""
        thought = _THOUGHT.removeprefix("<think>\n") if is_open else _THOUGHT
        plain = self._changed(opened, [f"{lead}a{space}"])
        thinking = self._changed(opened, [f"{thought}a{space}"])
        white = self._changed(opened, [f"\n {thought * is_open}a \n", f"{thought[:-8]}</think> a\n"])
        what = (
            "removes the empty thinking of earlier turns"
            if "</think>" in self._opening
            else "writes earlier turns in another form"
        )
        parts = [
            (what, plain & thinking),
            ("writes earlier turns without thinking in another form", plain - thinking),
            ("removes the thinking of earlier turns", thinking - plain),
            ("changes the white space of earlier turns", white - plain - thinking),
        ]
        told = [f"{what} when a {' or '.join(sorted(roles))} message follows" for what, roles in parts if roles]
        told += [
            f"begins an answer to a {role} message with {last!r}, not {self._opening!r}"
            for role in sorted(self.roles)
            if not (last := self._frames[role,].pieces[-1]).endswith(self._opening)
        ]
        if not told:
            return ""
        fix = "serve the model with a template that keeps it"
        if plain | thinking == {"user"} and "tool" in self.roles:
            fix += ", or let the environment answer as role tool"
        return f"this template {' and '.join(told)}; here each turn stays as it was generated, so {fix}"

    def _changed(self, opened: str, turns: Sequence[str]) -> set[str]:
        """Return the roles before whose messages the template writes one of the turns otherwise."""
        found = {role for role in self.roles for turn in turns if self._rewrites(opened, turn, [role] * 2)}
        for before, role in (("tool", "user"), ("user", "tool")):
            if self.roles == {before, role} and not found & {before, role}:
                found |= {role} if any(self._rewrites(opened, turn, [before, role]) for turn in turns) else set()
        return found

    def _rewrites(self, opened: str, turn: str, roles: Sequence[str]) -> bool:
        """Return whether a conversation of equal turns differs from what the template writes, or is refused."""
        text, messages = self._prompt, list(_START[:1])
        for role in roles:
            frame = self._frames[role,]
            text += turn + frame.end + _joined(frame.pieces, ["m"])
            messages += [_said("assistant", opened + turn), _said(role, "m")]
        try:
            return self._render(messages) != text
        except _Failed:
            return True


def _histories(role: str) -> Iterator[list[dict[str, str]]]:
    """Yield conversations that end with the mark of an answer: with a system message, earlier turns, and thinking."""
    earlier = [_said("user", "y"), _said("assistant", "z")]
    yield [_said("system", "s"), *_START]
    yield [*earlier, *_START]
    yield [*earlier, _said(role, "w"), _START[1]]
    yield [_START[0], _said("assistant", _THOUGHT + _ANSWER)]


def _joined(pieces: Sequence[str], texts: Sequence[str]) -> str:
    return "".join(map(str.__add__, pieces, [*texts, ""]))
