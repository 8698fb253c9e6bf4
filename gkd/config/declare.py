"""Declare a key of the trainer's config: default, help, limits, and whether a resumed run may change it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gkd.config.function_path import is_path
from teacher_server.config.declare import Setting, declare

IF_CONSTANT = "if actor.optim.schedule is constant"
IF_MOVED = "name, server_ip, server_port, keys"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key(Setting):
    """Describe one key.

    Args:
        paths: whether the import path of a user's function is valid in addition to the choices.
        limits: limits that a check of several keys or of a list enforces, for the documentation.
        required: how to set a key that has no usable default; empty means the default is valid.
        resume: whether a resumed run may change the key; a text is the condition, see `gkd.run.resume_compat`.
    """

    paths: bool = False
    limits: str = ""
    required: str = ""
    resume: bool | str = False

    def is_valid(self, value: object) -> bool:
        return (self.paths and is_path(str(value))) or Setting.is_valid(self, value)

    def allowed(self) -> str:
        return Setting.allowed(self) + ", or package.module:function" * self.paths

    def all_limits(self) -> str:
        """Return the valid values in words, whichever check enforces them; empty means no limits."""
        return "; ".join(filter(None, (self.allowed(), self.limits)))


def key(default: Any, help: str, **options: Any) -> Any:
    """Return a dataclass field; `options` are the arguments of `Key`."""
    return declare(default, Key(help=help, **options))
