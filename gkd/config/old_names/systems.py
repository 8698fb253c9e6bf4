"""List the systems with a table, and find rows by a key that someone wrote here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase

from gkd.config.old_names import roll, slime, trl, verl
from gkd.config.old_names.row import Row, Table, mapped, meaningless, plain, unsupported

# Names of no single system: abbreviations, and keys that are expected in another section.
_COMMON = Table(
    "",
    "",
    (
        mapped("distill.temperature", "teacher.temperature"),
        mapped("lambda distill.lambda", "distill.on_policy_share"),
        mapped("max_tokens", "data.max_response_length"),
        mapped("ckpt_path", "trainer.resume"),
        mapped("rollout.cpu_kv_cache_mib", "rollout.kv_cache_mib", "its new name; it also sets the size on GPUs"),
        mapped("teacher.model", "teacher.path", "of teacher.backend=local; a server gets --model"),
        meaningless("teacher.n_gpus_per_node", "GPUs are chosen where its server starts: python -m teacher_server."),
        unsupported("etp actor.etp", "experts are split by actor.ep only."),
        unsupported("cp actor.cp", "context parallelism is not supported."),
    ),
)
SYSTEMS = {table.name: table for table in (verl.TABLE, trl.TABLE, slime.TABLE, roll.TABLE)}


def old_rows(key: str, own_words: Collection[str]) -> list[tuple[str, Row]]:
    """Return the rows that a key may come from, each with the title of its system.

    A key matches a name if both end in the same word and one has all words of the other in order: `actor.param_offload`
    matches `actor_rollout_ref.actor.megatron.param_offload`, and `trainer.max_steps` matches `max_steps`. Names that
    have all words of the key come before shorter ones.

    Args:
        own_words: words of the keys here. They are too common to match a shorter name or to begin a pattern.
    """
    if row := _COMMON.find(key):
        return [("", row)]
    wanted = plain(key).split(".")
    matches = functools.partial(_has_all, own_words)
    longer = [(table.title, row) for table in SYSTEMS.values() for row in _best(wanted, table, matches)]
    if longer or wanted[-1] in own_words:
        return longer
    return [(table.title, row) for table in SYSTEMS.values() for row in _best(wanted, table, _is_part)]


def _best(wanted: list[str], table: Table, matches: Callable[[list[str], list[str]], bool]) -> list[Row]:
    """Return the matching row with the fewest other words; for a key of one word, a row for each key here."""
    found = [
        (not row.new, "*" in words[-1], abs(len(words) - len(wanted)), row)
        for row, words in table.words
        if matches(wanted, words)
    ]
    rows: dict[str, Row] = {}
    for *_, row in sorted(found, key=lambda item: item[:3]):
        rows.setdefault(row.new, row)
    best = list(rows.values())
    return [row for row in best if row.new] if len(wanted) == 1 and best and best[0].new else best[:1]


def _has_all(own_words: Collection[str], wanted: list[str], words: list[str]) -> bool:
    if "*" in words[-1] and (len(words) > 2 or words[0] not in own_words):
        return fnmatchcase(".".join(wanted), ".".join(words))
    return words[-1] == wanted[-1] and _in_order(wanted, words)


def _is_part(wanted: list[str], words: list[str]) -> bool:
    return words[-1] == wanted[-1] and _in_order(words, wanted)


def _in_order(few: list[str], many: list[str]) -> bool:
    rest = iter(many)
    return all(word in rest for word in few)
