"""Environments that were written for TRL's `environment_factory`, as of TRL 1.16.

    class Echo(TrlEnvironment):
        factory = EchoToolEnv

As in TRL, public methods are tools, except `reset` and `get_reward`; `reset` gets all columns of the row, and objects
are used again after it. Methods without `async` run in a thread, not always in the same one. The reward is that of
`get_reward`, else the attribute `reward`, which TRL leaves to a reward function.

One thing differs: the student has read its prompt before `reset` runs, so what `reset` returns cannot be added to it.
That is an error unless `prompt_has_observation` promises that the prompts of the data contain it. Several factories,
chosen by a column, are not supported.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from gkd.environment.tools import ToolEnvironment, schema


class TrlEnvironment(ToolEnvironment):
    """One trajectory of an object that the factory makes."""

    factory: ClassVar[Callable[[], Any]]
    prompt_has_observation: ClassVar[bool] = False
    _idle: ClassVar[list[Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "factory" in cls.__dict__:
            cls._idle = [cls.factory()]  # as in TRL, one object tells the tools
            if not callable(getattr(cls._idle[0], "reset", None)):
                raise TypeError(f"{cls.__name__}: what factory returns has no method reset")
            cls.tools = [schema(method) for method in _tools_of(cls._idle[0]).values()]

    def __init__(self, row: dict[str, Any], seed: int) -> None:
        super().__init__(row, seed)
        self.reward: Any = None
        self._object: Any = None
        self._in_use = False

    async def step(self, text: str) -> list[dict[str, str]] | None:
        """Answer each call of a turn with a message."""
        self._in_use = True
        if self._object is None:
            await asyncio.to_thread(self._reset)
        messages = await super().step(text)
        self._in_use = False
        return messages

    def callables(self) -> dict[str, Callable[..., Any]]:
        """Return the tools of the object."""
        return _tools_of(self._object)

    async def close(self) -> None:
        """Read the reward."""
        if self._object is None or self._in_use:  # a method may still run in its thread: the object is not used again
            return
        self.reward = await asyncio.to_thread(getattr, self._object, "reward", None)  # a property may judge for long
        if get_reward := getattr(self._object, "get_reward", None):
            is_async = inspect.iscoroutinefunction(get_reward)
            self.reward = await get_reward() if is_async else await asyncio.to_thread(get_reward)
        self._idle.append(self._object)

    def _reset(self) -> None:
        self._object = self._idle.pop() if self._idle else type(self).factory()
        observation = self._object.reset(**self.row)
        if observation is not None and not self.prompt_has_observation:
            raise ValueError(
                f"reset returned an observation, {str(observation)[:100]!r}, which the student has not read. "
                "Fix: write it into the prompts of the data, and set prompt_has_observation = True"
            )


def _tools_of(instance: Any) -> dict[str, Callable[..., Any]]:
    # As in TRL, listed on the class: on the object this would read properties, and a `reward` may be one that judges.
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
    return {name: getattr(instance, name) for name in names if name[0] != "_" and name not in ("reset", "get_reward")}
