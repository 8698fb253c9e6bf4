"""Suggest a key for one that does not exist: the setting of another system that it is, else the nearest key."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from gkd.config.key_list import all_keys, sections
from gkd.config.old_names.row import Row
from gkd.config.old_names.systems import SYSTEMS, old_rows

_MOST = 3  # keys of one suggestion


def suggestion(key: str) -> str:
    """Return what to write instead of a key that does not exist, as a sentence."""
    if rows := old_rows(key, _own_words()):
        return _instead(rows)
    found = nearest_keys(key)
    return f"did you mean {' or '.join(found)}?" if found else "python -m gkd.main_gkd --help lists all keys."


def nearest_keys(key: str) -> list[str]:
    """Return the keys or sections that differ by a typing error, else the keys of this name in other sections."""
    typed = [name for name in (*all_keys(), *sections()) if _is_typing_error(key, name)]
    last = key.rpartition(".")[2]
    return (typed or [name for name in all_keys() if name.rpartition(".")[2] == last])[:_MOST]


def flag_suggestion(word: str) -> str:
    """Return what to write instead of a flag of another system; empty: it is not listed."""
    flag = word.partition("=")[0]
    return _instead([(t.title, row) for t in SYSTEMS.values() if (row := t.find(flag))]) if flag.startswith("-") else ""


def is_hydra_flag(word: str) -> bool:
    """Return whether a word is a flag of Hydra's own, such as --config-name."""
    row = SYSTEMS["verl"].find("--config-name")
    return word.startswith("-") and row is not None and word.partition("=")[0] in row.names


def _instead(rows: Sequence[tuple[str, Row]]) -> str:
    if len({row.new or row.note for _, row in rows}) > 1:
        return " ".join(f"{title}: {_text(row, row.note)}" for title, row in rows)
    notes = {row.note for _, row in rows}
    return next((_text(row, row.note if len(notes) == 1 else "") for _, row in rows), "")


def _text(row: Row, note: str) -> str:
    if row.new:
        return f"use {' and '.join(row.keys)}{f' ({note})' if note else ''}."
    return f"remove it: {note}"


def _is_typing_error(key: str, name: str) -> bool:
    """Return whether each part differs by at most two letters (one if it has up to five), or only dots are confused.

    In words of up to three letters, such as tp and pp, every letter matters; only one too many or too few is an error.
    """
    ours, theirs = key.split("."), name.split(".")
    if len(ours) != len(theirs):
        return key.replace(".", "_") == name.replace(".", "_")
    return all(
        a == b or _edits(a, b) <= (2 if len(b) > 5 else 1 if len(b) > 3 or len(a) != len(b) else 0)
        for a, b in zip(ours, theirs, strict=True)
    )


def _edits(a: str, b: str) -> int:
    """Return how many letters to insert, delete or replace to turn a text into another; exact up to 2."""
    if abs(len(a) - len(b)) > 2:
        return 3  # or more
    above = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        row = [i]
        for j, right in enumerate(b, start=1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (left != right)))
        above = row
    return above[-1]


@functools.cache
def _own_words() -> frozenset[str]:
    return frozenset(word for name in all_keys() for word in name.split("."))
