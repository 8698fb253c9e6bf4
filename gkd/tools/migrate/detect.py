"""Find the dialect that settings are written in."""

from __future__ import annotations

from fnmatch import fnmatchcase

from gkd.config.dialects.table import Dialect, dialects, plain
from gkd.errors import ConfigError
from gkd.tools.migrate.read import Old


def names() -> list[str]:
    """Return what the command line accepts: systems, and dialects."""
    return list(dict.fromkeys([each.system for each in dialects().values()] + list(dialects())))


def find_dialect(asked: str, old: Old) -> Dialect:
    """Return the dialect of settings: the one whose program they start, else the one with the most names of its own.

    Args:
        asked: a dialect, which is then taken; a system, whose dialects are tried; if empty, all are tried.

    Raises:
        ConfigError: `asked` is not known, or the settings fit none or several dialects.
    """
    if asked in dialects():
        return dialects()[asked]
    tried = [each for each in dialects().values() if asked in ("", each.system)]
    if not tried:
        raise ConfigError("SYSTEM", asked, "is not a known system.", f"use one of {', '.join(names())}.")
    scores = {each.name: _score(each, old) for each in tried}
    best = [name for name, score in scores.items() if score == max(scores.values())]
    if len(best) == 1 and (len(tried) == 1 or scores[best[0]] > (0, 0)):
        return dialects()[best[0]]
    problem = f"the settings fit {'several' if any(max(scores.values())) else 'none'} of {', '.join(best)}."
    raise ConfigError("SYSTEM", asked, problem, "name the dialect: python -m gkd.tools.migrate DIALECT FILE.")


def _score(dialect: Dialect, old: Old) -> tuple[int, int]:
    """Return how many words of the command, and how many names, only this dialect has."""
    found = [plain(name) for name in old.settings]
    programs = sum(any(fnmatchcase(word, pattern) for word in old.words) for pattern in dialect.programs)
    return programs, sum(any(fnmatchcase(name, plain(pattern)) for name in found) for pattern in dialect.detect)
