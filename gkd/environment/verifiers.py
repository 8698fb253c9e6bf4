"""Environments that were written for `MultiTurnEnv` of the package verifiers, before its version 0.4, which has none.

    class Wordle(VerifiersEnvironment):
        @staticmethod
        def load():
            return vf.load_environment("wordle")

The environment's own `env_response`, stop conditions, clean-up and rubric are used; its rollout loop, which calls an
OpenAI client, and rewards of groups are not. Rows are those of its dataset: `prompt`, `answer`, `info`, `example_id`.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from gkd.environment.tools import CallError, parse_calls, value_of


class VerifiersEnvironment:
    """One trajectory of an environment, which all trajectories of the process share."""

    loaded: ClassVar[Any]
    tools: ClassVar[list[dict[str, Any]]] = []

    @staticmethod
    def load() -> Any:
        """Return the environment. Raises TypeError: the subclass does not define it."""
        raise TypeError("a VerifiersEnvironment needs a method load(), which returns the environment")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.loaded = cls.load()
        named = [{key: getattr(tool, key) for key in ("name", "description", "parameters")} for tool in _tools(cls)]
        cls.tools = [{"type": "function", "function": function} for function in named]

    def __init__(self, row: dict[str, Any], seed: int) -> None:
        self.reward: float | None = None
        self._row = row
        self._state: Any = None
        self._messages: list[Any] = []

    async def step(self, text: str) -> list[dict[str, Any]] | None:
        """Add a turn to the state, and return the environment's messages to it."""
        if self._state is None:
            await self._begin()
        turn = self._turn(text)
        step = {
            **dict.fromkeys(("response", "tokens", "reward", "advantage")),
            **{"prompt": self._messages, "completion": [turn], "is_truncated": False, "extras": {}},
            "trajectory_id": self._state["trajectory_id"],
        }
        await self.loaded.add_trajectory_step(self._state, step)
        if await self.loaded.is_completed(self._state):
            return None
        known = [*self._messages, turn]
        self._messages = list(await self.loaded.get_prompt_messages(self._state))
        if self._state.get("final_env_response") is not None:
            return None
        if self._messages[: len(known)] != known:
            raise ValueError("get_prompt_messages changed messages that the student has read")
        return [
            {"role": _get(message, "role"), "content": _get(message, "content")}
            for message in self._messages[len(known) :]
        ]

    async def close(self) -> None:
        """Clean up the state, and judge the trajectory."""
        if self._state is not None:
            await self.loaded.cleanup(self._state)
            await self.loaded.rubric.score_rollout(self._state)
            self.reward = self._state["reward"]

    async def _begin(self) -> None:
        from verifiers.types import ClientConfig  # an extra dependency, which takes seconds to import

        # The state needs a client. The environments that call it for a model of their own get no answer.
        client = ClientConfig(api_base_url="http://127.0.0.1:9/none", api_key_var="GKD_NO_KEY")
        state = await self.loaded.init_state({"example_id": 0, **self._row}, client, "student")
        self._state = await self.loaded.setup_state(state) or state
        self._messages = list(self._state["prompt"])

    def _turn(self, text: str) -> Any:
        from verifiers.types import AssistantMessage, ToolCall

        calls = []
        for number, call in enumerate(parse_calls(text) if self.tools else ()):
            if isinstance(call, CallError):
                name, arguments = "", str(call)  # not JSON, as the environment answers then
            else:
                values = {name: value_of(value, Any, call.is_text) for name, value in call.arguments.items()}
                name, arguments = call.name, json.dumps(values)
            calls.append(ToolCall(id=f"call_{number}", name=name, arguments=arguments))
        return AssistantMessage(content=text, tool_calls=calls or None)


def _tools(kind: type[VerifiersEnvironment]) -> list[Any]:
    return list(getattr(kind.loaded, "tool_defs", None) or ())


def _get(message: Any, name: str) -> Any:
    return message[name] if isinstance(message, dict) else getattr(message, name)
