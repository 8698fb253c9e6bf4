"""Declare settings as fields of a dataclass, each with its limits, and with its help as a text below it.

    port: int = declare(15555, Setting(ge=0, le=65535))
    '''Port that clients connect to.'''

Shared by the teacher server and the trainer, so it imports the standard library only.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

_METADATA = "setting"
_PATH = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*"


def is_path(name: str) -> bool:
    """Return whether a name has the form of an import path, `package.module:function`."""
    return re.fullmatch(_PATH, name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Describe one setting. A number must satisfy every bound that is given; NaN satisfies none.

    Args:
        longest: the most characters of a text; 0 = no limit.
        paths: whether the import path of a user's function is valid in addition to the choices.
        read: returns the value for a form that is short for it, and others as they are, e.g. one URL for a list.
        required: how to set a key that has no usable default; empty means the default is valid.
        example: a valid value in words, for errors; empty means that of the type.
    """

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    longest: int = 0
    paths: bool = False
    read: Callable[[Any], Any] | None = None
    required: str = ""
    example: str = ""

    def is_valid(self, value: object) -> bool:
        """Return whether a value, or each of a list or mapping, is one of the choices, or a number inside the bounds.

        Entries of a list with choices have to be distinct. The choices of a mapping are its names.
        """
        if isinstance(value, list):
            return all(map(self.is_valid, value)) and (not self.choices or len(set(value)) == len(value))
        if isinstance(value, dict):
            number = dataclasses.replace(self, choices=())
            return set(value) <= set(self.choices or value) and all(map(number.is_valid, value.values()))
        if self.choices and value not in self.choices:
            return self.paths and is_path(str(value))
        if isinstance(value, str) and self.longest:
            return len(value) <= self.longest
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
        if self.longest:
            return f"at most {self.longest} characters"
        bounds = ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le))
        return " and ".join(f"{sign} {_plain(bound)}" for sign, bound in bounds if bound is not None)


S = TypeVar("S", bound=Setting)


@dataclass(frozen=True, slots=True)
class Declared(Generic[S]):
    """A setting by its dotted name.

    Args:
        type: its annotation, e.g. "list[str]".
        owner: the dataclass that declares it.
    """

    name: str
    type: str
    default: Any
    setting: S
    owner: Any

    @property
    def help(self) -> str:
        """Return the text below the field."""
        return _texts(self.owner)[self.name.rpartition(".")[2]]


def declare(default: Any, setting: Setting) -> Any:
    """Return a dataclass field with this default and description. Every instance has its own list or dict."""
    metadata = {_METADATA: setting}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def keys_of(cls: type, kind: type[S], prefix: str = "") -> dict[str, Declared[S]]:
    """Return the settings of a dataclass and of those in it, its sections, by dotted name in their order."""
    keys: dict[str, Declared[S]] = {}
    for item in dataclasses.fields(cls):
        name = f"{prefix}{item.name}"
        setting = item.metadata.get(_METADATA)
        default = item.default_factory() if callable(item.default_factory) else item.default
        if isinstance(setting, kind):
            keys[name] = Declared(name, str(item.type), default, setting, cls)
        elif dataclasses.is_dataclass(default):
            keys |= keys_of(type(default), kind, f"{name}.")
    return keys


@functools.cache
def _texts(cls: type) -> Mapping[str, str]:
    """Return the text below each field of a dataclass, also of one that it inherits, in one line."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        (declaration,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(declaration, ast.ClassDef)
        for item, below in itertools.pairwise(declaration.body):
            match item, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"
