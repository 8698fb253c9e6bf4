"""Declare a key of the trainer's config: default, help, limits, and whether a resumed run may change it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from teacher_server.config.declare import Setting, declare

IF_CONSTANT = "if actor.optim.schedule is constant"
IF_MOVED = "backend, name, server_ip, server_port, keys, url, dialect, api_key_env"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key(Setting):
    """Describe one key.

    Args:
        limits: limits that a check of several keys or of a list enforces, for the documentation.
        required: how to set a key that has no usable default; empty means the default is valid.
        resume: whether a resumed run may change the key; a text is the condition, see `gkd.run.resume_compat`.
    """

    limits: str = ""
    required: str = ""
    resume: bool | str = False

    def all_limits(self) -> str:
        """Return the valid values in words, whichever check enforces them; empty means no limits."""
        return "; ".join(filter(None, (self.allowed(), self.limits)))


def key(default: Any, help: str, **options: Any) -> Any:
    """Return a dataclass field; `options` are the arguments of `Key`."""
    return declare(default, Key(help=help, **options))
