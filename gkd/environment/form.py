"""The form of what users write: the class, the messages that it returns, its reward. All checks of them are here.

    class Shop:
        tools = [...]                  # optional: schemas of tools in OpenAI's form, which the first prompt shows
        reward = 0.0                   # optional, also None; read after `close`

        def __init__(self, row: dict, seed: int): ...
        async def step(self, text: str) -> list[dict] | None: ...
        async def close(self) -> None: ...  # optional

One object is a trajectory. `step` gets the student's turn, and returns the messages that follow it, with role `tool` or
`user` and text as content; None ends the trajectory.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from gkd.errors import EnvironmentError
from gkd.user_code import finite_number, import_function, shown

ROLES = ("tool", "user")
MAX_BYTES = 2**20  # longest text of a reply, in UTF-8


class Fault(Exception):
    """A trajectory ends because of its environment; the text has the reason."""


def import_environment(path: str) -> type[Any]:
    """Return the class of a path. Raises EnvironmentError: it cannot be imported, or does not have the form above."""
    try:
        kind = import_function(path)
    except ImportError as error:
        raise EnvironmentError(str(error)) from error
    if not inspect.isclass(kind):
        raise EnvironmentError(f"{path}: is a {type(kind).__name__}, not a class")
    for name, form, arguments in (("step", "step(self, text)", (None, "")), ("close", "close(self)", (None,))):
        method = getattr(kind, name, None)
        if method is None and name == "close":
            continue
        if not inspect.iscoroutinefunction(method) or not _takes(method, *arguments):
            raise EnvironmentError(f"{path}: has no method `async def {form}`")
    if not _takes(kind, {}, 0):
        raise EnvironmentError(f"{path}: has no method `def __init__(self, row, seed)`")
    if problem := _problem_of_tools(getattr(kind, "tools", ())):
        raise EnvironmentError(f"{path}: {problem}")
    return kind


def checked_messages(messages: Any) -> list[dict[str, str]] | None:
    """Return what `step` returned, with texts of type str itself. Raises Fault: it has another form."""
    if messages is None:
        return None
    if not isinstance(messages, list) or not messages:
        raise Fault(f"step returned {shown(messages)}, not None or a list of messages")
    plain: list[dict[str, str]] = []
    size = 0
    for message in messages:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise Fault(f"step returned {shown(message)}, not a message with role and content alone")
        if message["role"] not in ROLES:
            raise Fault(f"step returned a message of role {shown(message['role'])}. Roles are {', '.join(ROLES)}")
        role = ROLES[ROLES.index(message["role"])]
        if not isinstance(message["content"], str):
            raise Fault(f"step returned a message whose content is {shown(message['content'])}, not text")
        try:
            content = message["content"].encode()
        except UnicodeEncodeError as error:
            raise Fault(f"step returned a message whose content is no Unicode text ({error})") from error
        size += len(role) + len(content)
        plain.append({"role": role, "content": content.decode()})
    if size > MAX_BYTES:
        raise Fault(f"step returned {size} bytes of text, more than {MAX_BYTES}")
    return plain


def checked_reward(environment: object) -> float | None:
    """Return the reward of a trajectory that has ended. Raises Fault: it is not a finite number."""
    value = getattr(environment, "reward", None)
    number = None if value is None else finite_number(value)
    if isinstance(number, str):
        raise Fault(f"reward is {number}")
    return number


def _takes(function: Any, *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def _problem_of_tools(tools: Any) -> str:
    if not isinstance(tools, list | tuple):
        return f"tools is a {type(tools).__name__}, not a list of schemas"
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
            return f"the tool {shown(tool)} is no schema of the form {form}"
    try:
        json.dumps(tools, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        return f"tools has no JSON form ({error})"
    return ""
