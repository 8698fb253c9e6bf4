"""Read whole conversations of a dataset (data.messages_key) as trajectories.

The prompt is what stands before the first message of the assistant. The response is all that follows, up to the last
one. It has the form of a rollout with an environment: the assistant's texts, each with its end token, are learned, and
the messages between them are rendered as `gkd.data.chat_delta` renders observations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from gkd.data.chat_delta import ChatDelta
from gkd.data.conversation import Conversation, Setting, quoted
from gkd.errors import ConfigError, DataError

Message = Mapping[str, Any]


def split_conversation(whole: Conversation, setting: Setting, where: str) -> tuple[Conversation, tuple[Message, ...]]:
    """Return the prompt, and the messages from the first to the last one of the assistant.

    Raises:
        ConfigError: there are no messages, no assistant's, none before it, or calls of tools that are not text.
    """
    last = () if whole.response is None else ({"role": "assistant", "content": whole.response},)
    messages: tuple[Message, ...] = (*whole.messages, *last)
    own = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not own or own[0] == 0:
        found = f"has the roles {[message['role'] for message in messages]}" if messages else "is a text"
        fix = "write messages: of the user, then of the assistant, and so on."
        raise ConfigError(*setting, f"the conversation of {where} {found}.", fix)
    turns = messages[own[0] : own[-1] + 1]
    if calls := [message for message in turns if message.get("tool_calls")]:
        problem = f"{where} has calls of tools as objects: {quoted(calls[0]['tool_calls'])}."
        raise ConfigError(*setting, problem, "write them into the text, in the form that the student shall learn.")
    return replace(whole, messages=whole.messages[: own[0]], response=None), turns


class DialogueReader:
    """Return the tokens of the turns behind a prompt.

    Args:
        ends: token ids that end a turn; the template's is appended to each text.
        limit: data.max_response_length.

    Raises:
        ConfigError: see `ChatDelta`.
    """

    def __init__(self, tokenizer: Any, delta: ChatDelta, ends: Sequence[int], limit: int, setting: Setting) -> None:
        self._tokenizer, self._delta, self._ends, self._limit, self._setting = tokenizer, delta, ends, limit, setting

    def read(self, turns: Sequence[Message], where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the response, [R] int32, and which of its tokens are the assistant's own, [R] bool.

        What exceeds the limit is cut off; the response then ends with an own token that need not be an end token.

        Raises:
            ConfigError: a text has an end token or no tokens; the template cannot write a message between the turns.
        """
        parts: list[tuple[np.ndarray, bool]] = []
        for is_own, group in groupby(turns, lambda message: message["role"] == "assistant"):
            messages = list(group)
            try:
                parts.append((self._turn(messages) if is_own else self._delta.ids(messages), is_own))
            except DataError as error:
                problem = f"the conversation of {where} cannot be read: {error}"
                raise ConfigError(*self._setting, problem, "correct or remove the row.") from error
        ids = np.concatenate([part for part, _ in parts])[: self._limit]
        own = np.repeat([is_own for _, is_own in parts], [len(part) for part, _ in parts])[: self._limit]
        n = int(np.flatnonzero(own)[-1]) + 1
        return ids[:n].astype(np.int32), own[:n]

    def _turn(self, messages: Sequence[Message]) -> np.ndarray:
        if len(messages) > 1:
            raise DataError("it has two messages of the assistant in a row.")
        text = messages[0]["content"]
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids or any(token in self._ends for token in ids):
            raise DataError(f"a message of the assistant has no tokens, or an end token: {quoted(text)}.")
        return np.asarray([*ids, self._delta.end_id], np.int32)
