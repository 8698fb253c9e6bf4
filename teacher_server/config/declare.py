"""Declare settings as dataclass fields that carry their help, limits and choices.

    port: int = declare(15555, Setting(help="Port that clients connect to.", ge=0, le=65535))

Shared by the teacher server and the trainer, so it imports the standard library only.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any

OTHER_BASE = re.compile(r"[-+]?0[0-9_]+|.*:.*")  # numbers that YAML reads in base 8 (010) or 60 (1:30)
_METADATA = "setting"
_PATH = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*"


def is_path(name: str) -> bool:
    """Return whether a name has the form of an import path, `package.module:function`."""
    return re.fullmatch(_PATH, name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Describe one setting. A number must satisfy every bound that is given; NaN satisfies none.

    Args:
        paths: whether the import path of a user's function is valid in addition to the choices.
    """

    help: str
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    paths: bool = False

    def is_valid(self, value: object) -> bool:
        """Return whether the value is one of the choices; a number has to be finite and inside the bounds."""
        if self.choices and value not in self.choices:
            return self.paths and is_path(str(value))
        return not isinstance(value, int | float) or (
            math.isfinite(value)
            and (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )

    def allowed(self) -> str:
        """Return the valid values in words, like `0 to 65535`, `> 0` or `cpu, cuda`; empty means no limits."""
        if self.choices:
            return ", ".join(self.choices) + ", or package.module:function" * self.paths
        if self.ge is not None and self.le is not None:
            return f"{_plain(self.ge)} to {_plain(self.le)}"
        bounds = ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le))
        return " and ".join(f"{sign} {_plain(bound)}" for sign, bound in bounds if bound is not None)


def declare(default: Any, setting: Setting) -> Any:
    """Return a dataclass field with this default and description. Every instance has its own list or dict."""
    metadata = {_METADATA: setting}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(item: dataclasses.Field[Any]) -> Setting | None:
    """Return the description of a field that `declare` made; None for any other field."""
    return item.metadata.get(_METADATA)


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"
