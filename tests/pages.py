"""`python -m tests.pages`: write the tables of the docs that repeat what the code declares.

Only what stands between `BEGIN` and `END` is replaced.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from gkd.config.declare import Key
from gkd.config.schema_sections import all_keys
from gkd.metrics.catalog import DOTTED, FUNCTION, KEY, NAME, NUMBER, PLACEHOLDERS
from teacher_server.config.declare import Declared
from tests.gpu.page import section
from tests.structure import ROOT

BEGIN, END = "<!-- tables, written by python -m tests.pages -->", "<!-- end of the tables -->"


def tables() -> dict[str, str]:
    """Return page -> its tables as Markdown, for each page in `docs` that has any."""
    return {
        "configuration.md": _config_tables(),
        "metrics.md": _table(("placeholder", "values"), ((f"`<{name}>`", _values(name)) for name in PLACEHOLDERS)),
        "results.md": section(ROOT / "docs" / "results"),
        "models.md": _models(ROOT / "docs" / "results" / "models.json"),
    }


def with_tables(page: str, found: str) -> str:
    """Return a page with its tables renewed."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{found}\n{END}{rest.partition(END)[2]}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], heading: str = "") -> str:
    lines = [heading, ""] if heading else []
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "".join(f"{line}\n" for line in (*lines, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)))


def _cell(text: str) -> str:
    """Return the text with escaped columns, and with links for the names of pages."""
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text.replace("|", r"\|"))


def _config_tables() -> str:
    sections: dict[str, list[Declared[Key]]] = {}
    for each in all_keys().values():
        sections.setdefault(each.name.partition(".")[0], []).append(each)
    columns = ("key", "type", "default", "limits", "resume", "meaning")
    return "\n".join(_table(columns, map(_key_row, keys), f"## {name}") for name, keys in sections.items())


def _key_row(each: Declared[Key]) -> tuple[str, ...]:
    key = each.setting
    resume = key.resume if isinstance(key.resume, str) else "yes" if key.resume else "no"
    return (
        f"`{each.name}`",
        each.type,
        f"`{'auto' if each.default is None else repr(each.default)}`",
        key.all_limits(),
        resume,
        each.help,
    )


def _values(name: str) -> str:
    values = PLACEHOLDERS[name]
    if isinstance(values, str):
        return {
            NAME: "a name in `teacher.routes`",
            FUNCTION: "a function of `reward.functions`, without its module",
            NUMBER: "a number",
            KEY: "a key of `trainer.schedules`",
        }[values]
    return ", ".join(
        "`package.module.function` for a function of your own" if value == DOTTED else f"`{value}`" for value in values
    )


def _models(file: Path) -> str:
    """Return the outcomes of `tests.models` by family, their numbers, and the reasons of those that are not ok."""
    rows = json.loads(file.read_text())["families"]
    parts = [part for part in rows[0] if part not in ("family", "why")]
    table = [(row["family"], *(row[part] for part in parts)) for row in rows]
    counts = {part: Counter(row[part].split()[0] for row in rows) for part in parts}
    numbers = [(kind, *(str(counts[part][kind]) for part in parts)) for kind in ("ok", "R", "V", "C", "W")]
    found: dict[tuple[str, str], dict[str, list[str]]] = {}  # (kind, reason) -> part -> families
    for row in rows:
        for part, why in row["why"].items():
            by_part = found.setdefault((row[part].split()[0], _any_model(why)), {})
            by_part.setdefault(part, []).append(row["family"])
    reasons: dict[tuple[str, str, str], list[str]] = {}  # (kind, families, reason) -> parts
    for (kind, why), by_part in sorted(found.items()):
        for part, names in by_part.items():
            text = ", ".join(names) if len(names) < len(rows) / 2 else f"{len(names)} families"
            reasons.setdefault((kind, text, why), []).append(part)
    lines = ((kind, ", ".join(each), names, why) for (kind, names, why), each in reasons.items())
    return "\n".join(
        (
            _table(("outcome", *parts), numbers),
            _table(("family", *parts), table, "## Families"),
            _table(("outcome", "parts", "families", "reason"), lines, "## Reasons"),
        )
    )


def _any_model(text: str) -> str:
    """Return an error without the names of a model, so that families with the same one share a line."""
    names = {
        r"model_type '\w+'": "its model_type",
        r"\ba \w+ model\b": "the model",
        r"(?<!vLLM's )\b[A-Z]\w+For(CausalLM|ConditionalGeneration)\b": "the model",
        r"\b[A-Z]\w+Attention\b": "its attention",
    }
    for pattern, words in names.items():
        text = re.sub(pattern, words, text)
    return text


if __name__ == "__main__":
    for name, found in tables().items():
        path = ROOT / "docs" / name
        path.write_text(with_tables(path.read_text(), found))
