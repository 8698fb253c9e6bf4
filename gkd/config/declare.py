"""Declare a key of the trainer's config: default, limits, and whether a resumed run may change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from teacher_server.config.declare import Setting, declare
from teacher_server.config.declare import is_path as is_path  # the server's engines have import paths, too

IF_NO_REWARD = "if exact_match is not in reward.functions"
IF_CONSTANT = "if actor.optim.schedule is constant"
IF_MOVED = "backend, name, server_ip, server_port, keys, url, dialect, api_key_env"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key(Setting):
    """Describe one key.

    Args:
        limits: limits that a check of several keys or of a list enforces, for the documentation.
        resume: whether a resumed run may change the key; a text is the condition, see `gkd.run.open`.
        is_file: whether it names files or folders, in which ~ and variables of the environment are replaced.
    """

    limits: str = ""
    resume: bool | str = False
    is_file: bool = False

    def all_limits(self) -> str:
        """Return the valid values in words, whichever check enforces them; empty means no limits."""
        return "; ".join(filter(None, (self.allowed(), self.limits)))


def key(default: Any, **options: Any) -> Any:
    """Return a dataclass field; `options` are the arguments of `Key`, and the text below the field is its help."""
    return declare(default, Key(**options))


def file_key(default: Any, **options: Any) -> Any:
    """Return the field of a key that names a file or folder, or a list of them."""
    return key(default, is_file=True, **options)


def auto_is(value: Any) -> Callable[[Any], Any]:
    """Return the function `Setting.read` of a key for which `auto` stands for a value of another type."""
    return lambda written: value if written == "auto" else written


def function_name(path: str) -> str:
    """Return the name of a function without its module."""
    return path.rpartition(":")[2]
