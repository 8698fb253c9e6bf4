"""Suggest a key for one that does not exist: the setting of another system that it is, else the nearest key."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase

from gkd.config.dialects.table import Dialect, Row, files, plain, read
from gkd.config.schema_sections import all_keys, sections

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


def old_rows(key: str, own_words: Collection[str]) -> list[tuple[str, Row]]:
    """Return the rows that a key may come from, each with the title of its dialect.

    A key matches a name if both end in the same word and one has all words of the other in order: `actor.param_offload`
    matches `actor_rollout_ref.actor.megatron.param_offload`, and `trainer.max_steps` matches `max_steps`. Names that
    have all words of the key come before shorter ones.

    Args:
        own_words: words of the keys here. They are too common to match a shorter name or to begin a pattern.
    """
    if row := files()["common"].find(key):
        return [("", row)]
    wanted = plain(key).split(".")
    found = _of_all(wanted, functools.partial(_has_all, own_words))
    return found if found or wanted[-1] in own_words else _of_all(wanted, _is_part)


def _of_all(wanted: list[str], matches: Callable[[list[str], list[str]], bool]) -> list[tuple[str, Row]]:
    """Return the best rows of each file; if some have a key here, those alone."""
    found = [(each.title, row) for each in files().values() if each.title for row in _best(wanted, each, matches)]
    return [(title, row) for title, row in found if row.keys] or found


def _best(wanted: list[str], file: Dialect, matches: Callable[[list[str], list[str]], bool]) -> list[Row]:
    """Return the matching row with the fewest other words; for a key of one word, a row for each key here."""
    found = [
        (not row.keys, "*" in words[-1], abs(len(words) - len(wanted)), row)
        for row, words in file.words
        if matches(wanted, words)
    ]
    rows: dict[str, Row] = {}
    for *_, row in sorted(found, key=lambda item: item[:3]):
        rows.setdefault(" ".join(row.keys), row)
    best = list(rows.values())
    return [row for row in best if row.keys] if len(wanted) == 1 and best and best[0].keys else best[:1]


def _has_all(own_words: Collection[str], wanted: list[str], words: list[str]) -> bool:
    if "*" in words[-1] and (len(words) > 2 or words[0] not in own_words):
        return fnmatchcase(".".join(wanted), ".".join(words))
    return words[-1] == wanted[-1] and _in_order(wanted, words)


def _is_part(wanted: list[str], words: list[str]) -> bool:
    return words[-1] == wanted[-1] and _in_order(words, wanted)


def _in_order(few: list[str], many: list[str]) -> bool:
    rest = iter(many)
    return all(word in rest for word in few)


def flag_suggestion(word: str) -> str:
    """Return what to write instead of a flag of another system; empty means it is not listed."""
    flag = word.partition("=")[0]
    found = [(each.title, row) for each in files().values() if (row := each.find(flag)) in each.own]
    return _instead(found) if flag.startswith("-") else ""


def is_hydra_flag(word: str) -> bool:
    """Return whether a word is a flag of Hydra's own, such as --config-name."""
    row = read("verl_common").find("--config-name") if word.startswith("-") else None
    return row is not None and word.partition("=")[0] in row.names


def _instead(rows: Sequence[tuple[str, Row]]) -> str:
    """Return the answers of the systems, each once."""
    answers: dict[str, list[tuple[str, Row]]] = {}
    for title, row in rows:
        answers.setdefault(" ".join(row.keys) or row.note, []).append((title, row))
    if len(answers) > 1:
        return " ".join(
            f"{' and '.join(t for t, _ in found)}: {_text(*found[0][1:], '')}" for found in answers.values()
        )
    notes = {row.note for _, row in rows}
    return next((_text(row, row.note if len(notes) == 1 else "") for _, row in rows), "")


def _text(row: Row, note: str) -> str:
    if row.keys:
        remark = f" ({note.rstrip('.')})" if note else ""
        return f"use {' and '.join(row.keys)}{remark}."
    return f"Remove it. {row.note}"


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
