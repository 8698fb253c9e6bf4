"""Say what to write instead of a key that does not exist: the key for a name of another system, or a similar key.

The names of other systems are the tables of docs/coming_from.md, to which `coming_from.md` in this folder is a link.
They decide what is trained and on how many GPUs.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from importlib.resources import files

from gkd.config.schema_sections import all_keys, sections

_OTHER_ROLES = ("teacher", "reference", "critic", "reward", "rewards", "validation")  # not the student's optimizer.lr


def suggestion(key: str) -> str:
    """Return what to write instead of a key that does not exist; empty if no known name is like it."""
    if name := _old_name(_plain(key)):
        return old_answer(name)
    near = nearest_keys(key)
    return f"did you mean {' or '.join(near)}?" if near else ""


def old_answer(name: str) -> str:
    """Return what to write instead of a name of another system, which may be a flag; empty means it is not listed."""
    if (row := old_names().get(_plain(name))) is None:
        return ""
    keys, change = row
    todo = f"use {' and '.join(keys)}." if keys else "remove it."
    return f"{todo} {change}".rstrip()


def nearest_keys(key: str) -> list[str]:
    """Return the keys that differ by a typing error, else the key at its end, else those of this name elsewhere."""
    if typed := difflib.get_close_matches(key, (*all_keys(), *sections()), n=3, cutoff=0.9):
        return typed
    if ends := [name for name in all_keys() if key.endswith(f".{name}") and _is_student_s(key)]:
        return ends
    section, _, last = key.rpartition(".")
    is_ours = section in ("", *sections())
    return [name for name in all_keys() if is_ours and name.rpartition(".")[2] == last][:3]


@cache
def old_names() -> dict[str, tuple[tuple[str, ...], str]]:
    """Return old name -> keys here, none if it has no equal, and how the value changes."""
    page = (files("gkd.config") / "coming_from.md").read_text(encoding="utf-8")
    rows = (line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `"))
    codes = ((re.findall("`(.+?)`", name), re.findall("`(.+?)`", keys), change.strip()) for name, keys, change in rows)
    return {_plain(name): (tuple(keys), change) for (name,), keys, change in codes}


def _plain(name: str) -> str:
    """Return a name without the signs of flags and of Hydra's overrides: `--save-interval` -> `save_interval`."""
    return name.lstrip("-+~").replace("-", "_")


def _old_name(key: str) -> str:
    """Return the longest name that a key is, or is below; else that it ends with; else that ends with it; or ""."""
    groups = (
        [name for name in old_names() if f"{key}.".startswith(f"{name}.")],
        [name for name in old_names() if key.endswith(f".{name}") and _is_student_s(key)],
        [name for name in old_names() if name.endswith(f".{key}")],
    )
    return max(next(filter(None, groups), [""]), key=len)


def _is_student_s(key: str) -> bool:
    return key.partition(".")[0] not in _OTHER_ROLES
