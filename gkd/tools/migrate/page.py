"""`python -m gkd.tools.migrate.page`: write the tables of docs/from_*.md from those of `gkd.config.old_names`."""

from __future__ import annotations

from pathlib import Path

from gkd.config.old_names.row import UNSET, Kind, Row, Table
from gkd.config.old_names.systems import SYSTEMS

BEGIN, END = "<!-- tables, written by python -m gkd.tools.migrate.page -->", "<!-- end of the tables -->"
_HEADINGS: dict[Kind, str] = {
    "mapped": "Settings with a key here",
    "not supported": "Not supported",
    "default": "Default here",
    "meaningless": "Nothing to set",
}


def page_path(table: Table) -> Path:
    """Return the page of a system, from the root of the repository."""
    return Path("docs") / f"from_{table.name}.md"


def with_tables(page: str, table: Table) -> str:
    """Return a page with its tables renewed."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(table)}\n{END}{rest.partition(END)[2]}"


def tables(table: Table) -> str:
    """Return the tables of a system as Markdown, one for each kind of row."""
    lines = []
    for kind, heading in _HEADINGS.items():
        rows = [row for row in table.rows if row.kind == kind]
        columns = ("old", "here", "remark") if kind == "mapped" else ("old", "remark")
        lines += [f"### {heading}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(_cells(row, table))} |" for row in rows] + [""]
    return "\n".join(lines)


def _cells(row: Row, table: Table) -> list[str]:
    note = row.note if row.default is UNSET else f"{row.note}; unset: {row.default}".removeprefix("; ")
    keys = [_code(row.keys)] if row.new else []
    return [_code(_short(row.names)), *keys, note.replace("|", "\\|")]


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _short(names: list[str]) -> list[str]:
    """Return the names without those that differ in the first word only, which is the name of a role."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(name.partition(".")[2] or name, name)
    return list(first.values())


if __name__ == "__main__":
    for each in SYSTEMS.values():
        path = page_path(each)
        path.write_text(with_tables(path.read_text(), each))
