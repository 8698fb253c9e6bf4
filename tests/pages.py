"""`python -m tests.pages`: write the tables of the docs that repeat what the code declares.

Only what stands between `BEGIN` and `END` is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gkd.config.dialects.table import UNSET, Dialect, Kind, Row, dialects, files
from gkd.config.schema_sections import DeclaredKey, all_keys
from gkd.metrics.catalog import DOTTED, FUNCTION, NAME, NUMBER, PLACEHOLDERS
from tests.structure import ROOT

BEGIN, END = "<!-- tables, written by python -m tests.pages -->", "<!-- end of the tables -->"
_HEADINGS: dict[Kind, str] = {
    "mapped": "settings with a key here",
    "refused": "refused, because it decides what is trained",
    "unsupported": "not supported",
    "default": "default here",
    "meaningless": "nothing to set",
}


def tables() -> dict[str, str]:
    """Return page -> its tables as Markdown, for each page in `docs` that has any."""
    systems = dict.fromkeys(each.system for each in dialects().values())
    return {
        "configuration.md": _config_tables(),
        "metrics.md": _placeholders(),
        **{f"from_{system}.md": _dialect_tables(system) for system in systems},
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
    sections: dict[str, list[DeclaredKey]] = {}
    for each in all_keys().values():
        sections.setdefault(each.name.partition(".")[0], []).append(each)
    columns = ("key", "type", "default", "limits", "resume", "meaning")
    return "\n".join(_table(columns, map(_key_row, keys), f"## {name}") for name, keys in sections.items())


def _key_row(each: DeclaredKey) -> tuple[str, ...]:
    key = each.key
    resume = key.resume if isinstance(key.resume, str) else "yes" if key.resume else "no"
    return f"`{each.name}`", each.type, f"`{each.default!r}`", key.all_limits(), resume, key.help


def _placeholders() -> str:
    return _table(("placeholder", "values"), ((f"`<{name}>`", _values(name)) for name in PLACEHOLDERS))


def _values(name: str) -> str:
    values = PLACEHOLDERS[name]
    if isinstance(values, str):
        return {
            NAME: "a name in `teacher.routes`",
            FUNCTION: "a function of `reward.functions`, without its module",
            NUMBER: "a number",
        }[values]
    return ", ".join(
        "`package.module.function` for a function of your own" if value == DOTTED else f"`{value}`" for value in values
    )


def _dialect_tables(system: str) -> str:
    """Return a table for each kind of row of the system's dialects, and of the files that they extend."""
    found = {each.name: each for each in dialects().values() if each.system == system}
    waiting = [base for each in found.values() for base in each.extends]
    while waiting:
        base = files()[waiting.pop(0)]
        found[base.name] = base
        waiting += base.extends
    return "\n".join(_kind_table(file, kind) for file in found.values() for kind in _HEADINGS if _rows(file, kind))


def _rows(file: Dialect, kind: Kind) -> list[Row]:
    return [row for row in file.own if row.kind == kind]


def _kind_table(file: Dialect, kind: Kind) -> str:
    columns = ("old", "here", "remark") if kind == "mapped" else ("old", "remark")
    return _table(columns, map(_setting_row, _rows(file, kind)), f"### {file.title}: {_HEADINGS[kind]}")


def _setting_row(row: Row) -> list[str]:
    note = row.note if row.default is UNSET else f"{row.note} Unset: {row.default}.".strip()
    names: dict[str, str] = {}
    for name in row.names:  # of names that differ in the first word alone, which is that of a role, the first
        names.setdefault(name.partition(".")[2] or name, name)
    keys = [_code(row.keys)] if row.kind == "mapped" else []
    return [_code(names.values()), *keys, note]


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    for name, found in tables().items():
        path = ROOT / "docs" / name
        path.write_text(with_tables(path.read_text(), found))
