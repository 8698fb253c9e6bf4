"""Render the messages behind a generated turn, of an environment or of a dataset's conversation: ids that continue it.

ids(t+1) = ids(t) + generated ids + delta(messages). Generated ids stay as they were sampled, with their end token. The
delta is what the chat template writes from that token to the next answer, in a short conversation. Before the first use
of a sequence of roles, `gkd.data.chat_frame` proves that it is the same in others.

Whole conversations of a dataset (data.messages_key) become trajectories of the same form. The prompt is what stands
before the first message of the assistant that is learned. The response is all that follows, up to the last one: the
assistant's texts, each with its end token, are learned, and the messages between them are rendered as those of an
environment. A text of the assistant that is not learned (`weight: 0`) is read like them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import groupby
from typing import Any

import numpy as np

from gkd.config.schema_sections import DataConfig
from gkd.data.chat_frame import ANSWER, QUESTION, START, TAG, THOUGHT, WHY, ChatFrames, Message, TemplateFailed, said
from gkd.data.conversation import Conversation, Setting, Turn, quoted, read_tools, unicode_problem
from gkd.data.render import PromptRenderer, Rendered
from gkd.errors import ConfigError, DataError

_SHORTEST_LINE = 4  # characters


class ChatDelta:
    """Return the delta of messages, for one tokenizer.

    Attributes:
        roles: of "tool" and "user", those that the template writes correctly.
        end_id: token that ends a turn which goes on.
        remark: one sentence on what the template would change in earlier turns, which here stay; or empty.

    Args:
        variables: data.chat_template_kwargs.
        end_ids: tokens that end a turn: of the model, and rollout.stop_token_ids.
        tools: schemas that the environment offers; the first prompt has them.
        setting: key that asks for trajectories and its value, for errors.

    Raises:
        ConfigError: there is no template; it writes no role token-exactly, or with `tools` not the role tool; it leaves
            out a tool; a tool has another form than OpenAI's; the template does not use a variable.
    """

    def __init__(
        self,
        tokenizer: Any,
        variables: dict[str, Any],
        end_ids: Sequence[int],
        tools: tuple[dict[str, Any], ...] = (),
        *,
        setting: Setting,
    ) -> None:
        self._tokenizer, self._end_ids = tokenizer, frozenset(end_ids)
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(*setting, "this tokenizer has no chat template.", "add one to the tokenizer.")
        renderer = PromptRenderer(tokenizer, "auto", variables)
        tools = read_tools(list(tools), setting, "the environment")
        try:
            renderer.render(Conversation((QUESTION,), tools=tools), setting, "the environment")
            self._frames = ChatFrames(tokenizer, {**variables, "tools": list(tools)} if tools else variables, end_ids)
        except (ConfigError, TemplateFailed) as error:
            problem = error.problem if isinstance(error, ConfigError) else f"{error}."
            raise ConfigError(*setting, problem, "use another model, or correct its template.") from error
        self._forms: dict[str, Callable[[str], str]] = {}
        self._reasons: dict[str, str] = {}
        for role in ("tool", "user"):
            try:
                self._forms[role] = self._frames.form(role)
            except DataError as error:
                self._reasons[role] = str(error)
        self.roles = frozenset(self._forms)
        ends = {self._frames.frame([role]).end for role in self.roles}
        if len(ends) != 1 or (tools and "tool" not in self.roles):
            reasons = [f"role {role}: {reason}" for role, reason in self._reasons.items()]
            problem = "; ".join(reasons) or f"the end token depends on the role that follows: {', '.join(sorted(ends))}"
            fix = "use a model whose template writes these messages and ends each turn with one of its end tokens."
            raise ConfigError(*setting, f"the chat template cannot continue a turn. {problem}.", fix)
        (end,) = ends
        self.end_id = next(i for i in end_ids if self._frames.added.get(i) == end)
        self._marker = re.compile("|".join(re.escape(marker) for marker in {*self._markers()} if marker.strip()))
        self.remark = _differences(self._frames, self.roles)

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
        return last_id == self.end_id

    def ids(self, messages: Sequence[Message]) -> np.ndarray:
        """Return the delta, [n] int32: messages behind the end token of a turn, and the beginning of the next answer.

        Raises:
            DataError: there are no messages; a message has another role, content that is not text, another key, invalid
                Unicode or a marker of the template; the template changes it, or fails with these roles.
        """
        if not isinstance(messages, Sequence) or not messages:
            raise DataError(f"the environment returned {quoted(messages)}, expected a list of messages.")
        for i, message in enumerate(messages, 1):
            self._check(message, f"message {i} of the environment")
        frame = self._frames.frame([message["role"] for message in messages])
        delta = self._frames.split([*START, *messages])[2]
        if delta != frame.around([self._forms[message["role"]](message["content"]) for message in messages]):
            raise DataError(f"the chat template changes the messages of the environment: it writes {quoted(delta)}.")
        ids = self._frames.encode(frame.end, delta)
        # A normalizer can make special tokens of characters in which the search for markers finds none.
        if frame.order != (found := tuple(i for i in ids if i in frame.watched)):
            special = self._tokenizer.convert_ids_to_tokens(list(Counter(found) - Counter(frame.order)))
            raise DataError(f"messages of the environment have the special tokens {special}: {quoted(delta)}.")
        return np.asarray(ids, dtype=np.int32)

    def _check(self, message: Message, name: str) -> None:
        """Raise DataError unless a message has a role that works and a valid text without markers."""
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            raise DataError(f"{name} is {quoted(message)}, expected the keys role and content.")
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or role not in self.roles:
            reason = self._reasons.get(role, "") if isinstance(role, str) else ""
            expected = f"expected {' or '.join(sorted(self.roles))}"
            raise DataError(f"{name} has the role {quoted(role)}, {expected}{reason and f': {reason}'}.")
        if not isinstance(content, str):
            raise DataError(f"{name} has {quoted(content)} as content, expected text.")
        if problem := unicode_problem(content):
            raise DataError(f"{name} {problem}.")
        if found := self._marker.search(content):
            raise DataError(f"{name} is {quoted(content)}, with {found[0]!r}, which separates messages.")

    def _markers(self) -> Iterator[str]:
        """Yield texts by which the model tells messages apart, so that no observation may hold them.

        Special tokens of another form than a tag are found in the ids.
        """
        frames = self._frames
        for roles in (("tool", "tool"), ("user", "user"), ("tool", "user")):
            with suppress(DataError):  # Messages with these roles are refused when they come.
                frames.frame(roles)
        yield ANSWER
        for frame in frames.proven.values():
            *pieces, last = frame.pieces
            for piece in (*pieces, last.removesuffix(frames.thinking)):
                found = set(TAG.findall(piece))
                # Some templates write names alone, such as "ASSISTANT:". A word of letters occurs in any text.
                lines = {line.strip() for line in piece.splitlines()} if not found else set()
                yield from (*found, *(line for line in lines if len(line) >= _SHORTEST_LINE and not line.isalnum()))


def _differences(frames: ChatFrames, roles: frozenset[str]) -> str:
    """Return what the template changes in earlier turns, as one sentence."""
    front = frames.split([*START, said(sorted(roles)[-1], "m")])[0]
    lead, _, space = front.removeprefix(frames.prompt).partition(ANSWER)  # The history has them, and models learn to.
    lead = lead if front.startswith(frames.prompt) and not lead.strip() else ""
    at = frames.opening.rfind("<think>")
    opened = frames.opening[at:] if at > frames.opening.rfind("</think>") else ""
    thought = THOUGHT.removeprefix(opened and "<think>\n")
    turns = {
        "plain": [f"{lead}a{space}"],
        "thinking": [f"{lead}{thought}a{space}"],
        "white": [f"\n {opened and thought}a \n", f"{lead}{thought[:-2]} a\n"],
    }
    changed = {kind: _changed(frames, roles, opened, made) for kind, made in turns.items()}
    empty = changed["plain"] if "</think>" in frames.opening and not opened else set()
    thinks = [QUESTION, said("assistant", opened + turns["thinking"][0])]
    removed = {role for role in changed["thinking"] if WHY not in _text(frames, [*thinks, said(role, "m")])}
    unfinished = changed["plain"] if opened else set()
    other = changed["thinking"] | (changed["plain"] - unfinished)
    parts = (
        ("removes the empty thinking of earlier turns", empty),
        ("removes the thinking of earlier turns", removed - empty),
        ("writes some earlier turns in another form", other - empty - removed),
        ("rewrites unfinished thinking", unfinished - removed),
        ("changes the white space of earlier turns", changed["white"] - other - unfinished),
    )
    told = [f"{what} when a {' or '.join(sorted(found))} message follows" for what, found in parts if found]
    for role in sorted(roles):
        if not (last := frames.frame([role]).pieces[-1]).endswith(frames.opening):
            told.append(f"begins the answer to a {role} message with {last!r} instead of {frames.opening!r}")
    if not told:
        return ""
    or_tool = ", or let the environment answer as role tool" if "tool" in roles and other == {"user"} else ""
    return (
        f"this template {' and '.join(told)}; here each turn stays as it was generated, so serve the model with a "
        f"template that keeps it{or_tool}"
    )


def _changed(frames: ChatFrames, roles: frozenset[str], opened: str, turns: Sequence[str]) -> set[str]:
    """Return the roles of messages behind which the template writes one of the turns otherwise."""
    found = {role for role in roles if any(_rewrites(frames, opened, turn, [role, role]) for turn in turns)}
    for before, role in (("tool", "user"), ("user", "tool")):
        if roles == {before, role} and not found & {before, role}:
            found |= {role} if any(_rewrites(frames, opened, turn, [before, role]) for turn in turns) else set()
    return found


def _rewrites(frames: ChatFrames, opened: str, turn: str, roles: Sequence[str]) -> bool:
    """Return whether the template refuses a conversation of equal turns, or writes another text than the trajectory's.

    Args:
        opened: the beginning of the turn's thinking that the prompt has already.
    """
    text, messages = frames.prompt, [QUESTION]
    for role in roles:
        frame = frames.frame([role])
        text += turn + frame.end + frame.around(["m"])
        messages += [said("assistant", opened + turn), said(role, "m")]
    return _text(frames, messages) != text


def _text(frames: ChatFrames, messages: Sequence[Message]) -> str:
    """Return the text of a conversation, or nothing if the template refuses it."""
    try:
        return frames.render(messages)
    except TemplateFailed:
        return ""


class DialogueReader:
    """Return the tokens of the turns behind a prompt.

    Args:
        ends: token ids that end a turn.
        renderer: of the prompts.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, ends: Sequence[int], renderer: PromptRenderer) -> None:
        self._renderer, self._ends, self._limit = renderer, ends, config.max_response_length
        self._setting = "data.messages_key", config.messages_key
        # The first row with messages between its turns needs it: not all templates can continue a turn.
        self._delta = cache(partial(ChatDelta, tokenizer, config.chat_template_kwargs, ends, setting=self._setting))

    def read(self, prompt: Rendered, turns: Sequence[Turn], where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the response, [R] int32, and which of its tokens are the assistant's own, [R] bool.

        What exceeds the limit is cut off; the response then ends with an own token that need not be an end token.

        Raises:
            ConfigError: see `PromptRenderer.answer_ids` and `ChatDelta`; the template cannot write a message between.
        """
        parts: list[tuple[list[int], bool]] = []
        history: list[dict[str, Any]] = []
        for is_turn, found in groupby(turns, lambda turn: turn[0]["role"] == "assistant"):
            read, flags = map(list, zip(*found, strict=True))
            group = prompt, history, read, where
            try:
                part = self._turn(*group) if is_turn else self._between(*group, parts[-1][0][-1])
            except DataError as error:
                problem = f"the conversation of {where} cannot be read: {error}"
                raise ConfigError(*self._setting, problem, "correct or remove the row.") from error
            parts.append((part, flags[0]))
            history = [*history[:1], *read]  # A short history, as that of `ChatDelta`, makes the time linear.
        ids = np.concatenate([part for part, _ in parts])[: self._limit]
        own = np.repeat([is_own for _, is_own in parts], [len(part) for part, _ in parts])[: self._limit]
        n = int(np.flatnonzero(own)[-1]) + 1
        return ids[:n].astype(np.int32), own[:n]

    def _turn(self, prompt: Rendered, history: list[Any], messages: Sequence[Message], where: str) -> list[int]:
        if len(messages) > 1:
            raise DataError("it has two messages of the assistant in a row.")
        here = self._renderer.continued(prompt, history, where) if history else prompt
        return self._renderer.answer_ids(here, messages[0]["content"], self._ends, self._setting, where)

    def _between(self, prompt: Rendered, history: list[Any], messages: list[Any], where: str, end: int) -> list[int]:
        if not self._delta().follows(end):
            raise DataError(f"the turn in front of {quoted(messages[0])} has another end than the template writes.")
        plain = [said(message["role"], message["content"]) for message in messages]  # without its time, for example
        read = (self._renderer.continued(prompt, [*history, *each], where).text for each in (plain, messages))
        return list(map(int, self._delta().ids(plain if plain != messages and next(read) == next(read) else messages)))
