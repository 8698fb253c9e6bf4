"""Read what a dataset says behind a prompt, as one trajectory: ids, and which of them the student learns.

One response is a trajectory of one turn. A whole conversation (data.messages_key) has a turn for each message of the
assistant, with its end token. The messages between the turns are rendered as those of an environment. A text of the
assistant that is not learned (`weight: 0`) is read like them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any

import numpy as np

from gkd.config.schema_sections import DataConfig
from gkd.data.chat_delta import ChatDelta
from gkd.data.conversation import Setting, Turn, quoted
from gkd.data.render import PromptRenderer, Rendered
from gkd.data.template import Message, said
from gkd.errors import ConfigError, DataError


class DialogueReader:
    """Return the tokens of the turns behind a prompt.

    Args:
        ends: token ids that end a turn.
        renderer: of the prompts.
        setting: key that the turns come from, and its value.
    """

    def __init__(
        self, config: DataConfig, tokenizer: Any, ends: Sequence[int], renderer: PromptRenderer, setting: Setting
    ) -> None:
        self._renderer = renderer
        self._ends = ends
        self._limit = config.max_response_length
        self._setting = setting
        # The first row with messages between its turns needs it: not all templates can continue a turn.
        self._delta = cache(partial(ChatDelta, tokenizer, config.chat_template_kwargs, ends, setting=setting))

    def read(self, prompt: Rendered, turns: Sequence[Turn], where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the response, [R] int32, and which of its tokens are the assistant's own, [R] bool.

        What exceeds the limit is cut off; the response then ends with an own token that need not be an end token.

        Raises:
            ConfigError: see `PromptRenderer.answer_ids` and `ChatDelta`; the template cannot write a message between.
        """
        parts: list[tuple[list[int], bool]] = []
        history: list[dict[str, Any]] = []
        for is_turn, group in groupby(turns, lambda turn: turn[0]["role"] == "assistant"):
            messages, flags = map(list, zip(*group, strict=True))
            try:
                if is_turn:
                    ids = self._turn(prompt, history, messages, where)
                else:
                    ids = self._between(prompt, history, messages, where, parts[-1][0][-1])
            except DataError as error:
                problem = f"the conversation of {where} cannot be read: {error}"
                raise ConfigError(*self._setting, problem, "correct or remove the row.") from error
            parts.append((ids, flags[0]))
            history = [*history[:1], *messages]  # A short history, as that of `ChatDelta`, makes the time linear.
        response = np.concatenate([part for part, _ in parts]).astype(np.int32)[: self._limit]
        own = np.repeat([is_own for _, is_own in parts], [len(part) for part, _ in parts])[: self._limit]
        n = int(np.flatnonzero(own)[-1]) + 1
        return response[:n], own[:n]

    def _turn(self, prompt: Rendered, history: list[Any], messages: Sequence[Message], where: str) -> list[int]:
        if len(messages) > 1:
            raise DataError("it has two messages of the assistant in a row.")
        here = self._renderer.continued(prompt, history, where) if history else prompt
        return self._renderer.answer_ids(here, messages[0]["content"], self._ends, self._setting, where)

    def _between(self, prompt: Rendered, history: list[Any], messages: list[Any], where: str, end: int) -> list[int]:
        if not self._delta().follows(end):
            raise DataError(f"the turn in front of {quoted(messages[0])} has another end than the template writes.")
        plain = [said(message["role"], message["content"]) for message in messages]  # without its time, for example
        if plain != messages:
            texts = [self._renderer.continued(prompt, [*history, *form], where).text for form in (plain, messages)]
            plain = plain if texts[0] == texts[1] else messages
        return self._delta().ids(plain).tolist()
