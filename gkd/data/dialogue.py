"""Read whole conversations of a dataset (data.messages_key) as trajectories.

The prompt is what stands before the first message of the assistant that is learned. The response is all that follows,
up to the last one. It has the form of a rollout with an environment: the assistant's texts, each with its end token,
are learned, and the messages between them are rendered as `gkd.data.chat_delta` renders observations. A text of the
assistant that is not learned (`weight: 0`) is read like them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from gkd.config.schema_sections import DataConfig
from gkd.data.chat_delta import ChatDelta
from gkd.data.conversation import Conversation, Setting, is_learned, quoted
from gkd.errors import ConfigError, DataError

Message = Mapping[str, Any]
OWN = "gkd_own"  # key of a turn: whether it is learned


def split_conversation(whole: Conversation, setting: Setting, where: str) -> tuple[Conversation, tuple[Message, ...]]:
    """Return the prompt, and the messages from the first to the last one of the assistant that is learned.

    Raises:
        ConfigError: there are no messages, no assistant's that is learned, none before it; or see `is_learned`.
    """
    messages = whole.messages if whole.response is None else (*whole.messages, whole.response)
    roles = [message["role"] for message in messages]
    own = [i for i, role in enumerate(roles) if role == "assistant" and is_learned(messages[i], setting, where)]
    if not own or own[0] == 0:
        found = f"has the roles {roles}, and {len(own)} messages to learn" if messages else "is a text"
        fix = "write messages: of the user, then of the assistant, and so on."
        raise ConfigError(*setting, f"the conversation of {where} {found}.", fix)
    turns = tuple({**messages[i], OWN: i in own} for i in range(own[0], own[-1] + 1))
    return replace(whole, messages=tuple(messages[: own[0]]), response=None), turns


class DialogueReader:
    """Return the tokens of the turns behind a prompt.

    Args:
        ends: token ids that end a turn; the template's is appended to each text.

    Raises:
        ConfigError: the template cannot continue a turn, see `ChatDelta`.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, ends: Sequence[int]) -> None:
        self._tokenizer, self._ends, self._limit = tokenizer, ends, config.max_response_length
        self._setting = "data.messages_key", config.messages_key
        self._delta = ChatDelta(tokenizer, config.chat_template_kwargs, ends, setting=self._setting)

    def read(self, turns: Sequence[Message], where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the response, [R] int32, and which of its tokens are the assistant's own, [R] bool.

        What exceeds the limit is cut off; the response then ends with an own token that need not be an end token.

        Raises:
            ConfigError: a text has an end token or no tokens; the template cannot write a message between the turns.
        """
        parts: list[tuple[np.ndarray, bool]] = []
        for is_turn, group in groupby(turns, lambda message: message["role"] == "assistant"):
            messages = list(group)
            is_own = bool(messages[0][OWN])
            read = [{key: value for key, value in message.items() if key != OWN} for message in messages]
            try:
                parts.append((self._turn(read) if is_turn else self._delta.ids(read), is_own))
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
