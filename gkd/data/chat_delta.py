"""Render the messages behind a generated turn, of an environment or of a dataset's conversation: ids that continue it.

ids(t+1) = ids(t) + generated ids + delta(messages). Generated ids stay as they were sampled, with their end token. The
delta is what the chat template writes from that token to the next answer, in a short conversation. Before the first use
of a sequence of roles, `ChatTemplate.frame_behind` proves that it is the same in others.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from gkd.data.conversation import Conversation, Setting, quoted, read_tools, unicode_problem
from gkd.data.render import PromptRenderer
from gkd.data.template import ANSWER, QUESTION, START, TAG, THOUGHT, ChatTemplate, Frame, Message, TemplateFailed, said
from gkd.errors import ConfigError, DataError

_PROBE = ' \n A"b\\<é>🙂\tz\n '  # a text that shows what a template changes
_SHORTEST_LINE = 4  # characters


class ChatDelta:
    """Return the delta of messages, for one tokenizer.

    Attributes:
        roles: of "tool" and "user", those that the template writes correctly.
        end_id: the only token behind which a turn can be continued: the delta begins behind it.
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
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        renderer = PromptRenderer(tokenizer, "auto", variables)
        tools = read_tools(list(tools), setting, "the environment")
        try:
            renderer.render(Conversation((QUESTION,), tools=tools), setting, "the environment")
        except ConfigError as error:
            raise ConfigError(*setting, error.problem, "use another model, or correct its template.") from error
        self._template = ChatTemplate(tokenizer, {**variables, "tools": list(tools)} if tools else variables, end_ids)
        self._reasons: dict[str, str] = {}  # why a role is lacking
        for role in ("tool", "user"):
            try:
                self._delta([said(role, _PROBE)])
            except DataError as error:
                self._reasons[role] = str(error)
        self.roles = frozenset({"tool", "user"} - self._reasons.keys())
        ends = {self._template.frame_behind([role]).end for role in self.roles}
        if len(ends) != 1 or (tools and "tool" not in self.roles):
            reasons = [f"role {role}: {reason}" for role, reason in self._reasons.items()]
            problem = "; ".join(reasons) or f"the end token depends on the role that follows: {', '.join(sorted(ends))}"
            fix = "use a model whose template writes these messages and ends each turn with one of its end tokens."
            raise ConfigError(*setting, f"the chat template cannot continue a turn. {problem}.", fix)
        (end,) = ends
        self.end_id = next(i for i in end_ids if self._template.added.get(i) == end)
        self._marker = re.compile("|".join(re.escape(marker) for marker in {*self._markers()} if marker.strip()))
        self.remark = _Remark(self._template, self.roles).text()

    def text(self, ids: np.ndarray) -> str:
        """Return a turn, [n] generated ids, as the environment reads it: without its end, with other special tokens."""
        body = ids[:-1] if len(ids) and int(ids[-1]) in self._end_ids else ids
        text: str = self._tokenizer.decode(body.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

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
        frame, delta = self._delta(messages)
        ids = self._template.encode(frame.end, delta)
        # A normalizer can make special tokens of characters in which the search for markers finds none.
        if frame.order != (order := tuple(i for i in ids if i in frame.watched)):
            special = self._tokenizer.convert_ids_to_tokens(list(Counter(order) - Counter(frame.order)))
            raise DataError(f"messages of the environment have the special tokens {special}: {quoted(delta)}.")
        return np.asarray(ids, dtype=np.int32)

    def _delta(self, messages: Sequence[Message]) -> tuple[Frame, str]:
        """Return the frame of messages, and the text of the delta. Raises DataError if the template changes a text."""
        frame = self._template.frame_behind([message["role"] for message in messages])
        delta = self._template.split([*START, *messages])[2]
        if not frame.holds(delta, messages):
            raise DataError(f"the chat template changes the messages of the environment: it writes {quoted(delta)}.")
        return frame, delta

    def _check(self, message: Message, name: str) -> None:
        """Raise DataError unless a message has a role that works and a valid text without markers."""
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            raise DataError(f"{name} is {quoted(message)}, expected the keys role and content.")
        role = message["role"]
        content = message["content"]
        if not isinstance(role, str) or role not in self.roles:
            reason = self._reasons.get(role, "") if isinstance(role, str) else ""
            expected = f"expected {' or '.join(sorted(self.roles))}"
            raise DataError(f"{name} has the role {quoted(role)}, {expected}{reason and f': {reason}'}.")
        if not isinstance(content, str):
            raise DataError(f"{name} has {quoted(content)} as content, expected text.")
        if problem := unicode_problem(content):
            raise DataError(f"{name} {problem}.")
        if marker := self._marker.search(content):
            raise DataError(f"{name} is {quoted(content)}, with {marker[0]!r}, which separates messages.")

    def _markers(self) -> Iterator[str]:
        """Yield texts by which the model tells messages apart, so that no observation may hold them.

        Special tokens of another form than a tag are found in the ids.
        """
        yield ANSWER
        pieces = list[str]()
        for roles in (("tool",), ("user",), ("tool", "tool"), ("user", "user"), ("tool", "user")):
            with suppress(DataError):  # Messages with these roles are refused when they come.
                *inner, last = self._template.frame_behind(roles).pieces
                pieces += [*inner, last.removesuffix(self._template.thinking)]
        for piece in pieces:
            tags = {*TAG.findall(piece)}
            # Some templates write names alone, such as "ASSISTANT:". A word of letters occurs in any text.
            lines = {line.strip() for line in piece.splitlines()} if not tags else set()
            yield from (*tags, *(line for line in lines if len(line) >= _SHORTEST_LINE and not line.isalnum()))


class _Remark:
    """Find what the template changes in earlier turns: it writes conversations of two equal turns.

    Each turn is written once plain, once with thinking, and with white space around it. A trajectory keeps both turns
    as they were generated. If the template's own text of the conversation differs, the model reads other turns when it
    is served than in training. Qwen3's template, for example, writes the thinking of the last turn alone if a question
    follows each turn: "changes the thinking of earlier turns when a user message follows".
    """

    def __init__(self, template: ChatTemplate, roles: frozenset[str]) -> None:
        self._template = template
        self._roles = sorted(roles)
        front = template.split([*START, said(self._roles[-1], "m")])[0]
        # White space of the template around an answer, which models learn to write.
        lead, _, space = front.removeprefix(template.prompt).partition(ANSWER)
        lead = lead if front.startswith(template.prompt) and not lead.strip() else ""
        self._opened = "" if "</think>" in template.thinking else template.thinking  # what a prompt has begun
        thought = THOUGHT.removeprefix(self._opened and "<think>\n")
        self._plain = self._changed(f"{lead}a{space}")
        self._thought = self._changed(f"{lead}{thought}a{space}")
        self._white = self._changed(f"\n {self._opened and thought}a \n", f"{lead}{thought[:-2]} a\n")

    def text(self) -> str:
        """Return the remark; nothing if the template changes no turn."""
        changes = defaultdict[str, list[str]](list)
        for role in self._roles:
            changes[self._change(role)].append(role)
        diffs = [
            f"changes the {change} of earlier turns when a {' or '.join(roles)} message follows"
            for change, roles in changes.items()
            if change
        ]
        opening = self._template.opening
        for role in self._roles:
            last = self._template.frame_behind([role]).pieces[-1]
            if not last.endswith(opening):
                diffs.append(f"begins the answer to a {role} message with {last!r} instead of {opening!r}")
        if not diffs:
            return ""
        rewrites = self._thought | (set() if self._opened else self._plain)
        or_tool = ", or let the environment answer as role tool" if rewrites == {"user"} < {*self._roles} else ""
        return (
            f"this template {' and '.join(diffs)}; here each turn stays as it was generated, so serve the model with a "
            f"template that keeps it{or_tool}"
        )

    def _change(self, role: str) -> str:
        """Return what the template changes in earlier turns when a message of this role follows; or nothing."""
        if role in self._plain and not self._opened:
            return "empty thinking" if self._template.thinking else "form"
        if role in self._thought:
            return "thinking"
        if role in self._plain:
            return "unfinished thinking"
        return "white space" if role in self._white else ""

    def _changed(self, *turns: str) -> set[str]:
        """Return the roles of messages behind which the template writes one of the turns otherwise."""
        changed = {role for role in self._roles if any(self._rewrites(turn, [role, role]) for turn in turns)}
        if len(self._roles) > 1 and not changed:
            mixed = (self._roles, self._roles[::-1])
            changed = {roles[-1] for roles in mixed if any(self._rewrites(turn, roles) for turn in turns)}
        return changed

    def _rewrites(self, turn: str, roles: Sequence[str]) -> bool:
        """Return whether the template writes another text than the trajectory's, with a message behind each turn."""
        text = self._template.prompt
        messages = [QUESTION]
        for role in roles:
            frame = self._template.frame_behind([role])
            text += turn + frame.end + frame.around(["m"])
            messages += [said("assistant", self._opened + turn), said(role, "m")]
        with suppress(TemplateFailed):
            return self._template.render(messages) != text
        return True
