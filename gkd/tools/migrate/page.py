"""`python -m gkd.tools.migrate.page`: write the tables of docs/from_*.md from the files of `gkd.config.dialects`."""

from __future__ import annotations

from pathlib import Path

from gkd.config.dialects.table import UNSET, Dialect, Kind, Row, dialects, files

BEGIN, END = "<!-- tables, written by python -m gkd.tools.migrate.page -->", "<!-- end of the tables -->"
_HEADINGS: dict[Kind, str] = {
    "mapped": "Settings with a key here",
    "refused": "Refused, because it decides what is trained",
    "unsupported": "Not supported",
    "default": "Default here",
    "meaningless": "Nothing to set",
}


def systems() -> list[str]:
    """Return the names of the pages."""
    return list(dict.fromkeys(each.system for each in dialects().values()))


def page_path(system: str) -> Path:
    """Return the page of a system, from the root of the repository."""
    return Path("docs") / f"from_{system}.md"


def with_tables(page: str, system: str) -> str:
    """Return a page with its tables renewed."""
    before, _, rest = page.partition(BEGIN)
    tables = "\n".join(_tables(each) for each in _files(system))
    return f"{before}{BEGIN}\n\n{tables}\n{END}{rest.partition(END)[2]}"


def _files(system: str) -> list[Dialect]:
    """Return the dialects of a system, then the files that they extend."""
    found = {each.name: each for each in dialects().values() if each.system == system}
    waiting = [base for each in found.values() for base in each.extends]
    while waiting:
        base = files()[waiting.pop(0)]
        found[base.name] = base
        waiting += base.extends
    return list(found.values())


def _tables(file: Dialect) -> str:
    """Return the tables of a file as Markdown, one for each kind of row."""
    lines = []
    for kind, heading in _HEADINGS.items():
        rows = [row for row in file.own if row.kind == kind]
        if rows:
            columns = ("old", "here", "remark") if kind == "mapped" else ("old", "remark")
            lines += [f"### {file.title}: {heading[0].lower()}{heading[1:]}", "", f"| {' | '.join(columns)} |"]
            lines += ["|---" * len(columns) + "|", *(f"| {' | '.join(_cells(row))} |" for row in rows), ""]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    note = row.note if row.default is UNSET else f"{row.note} Unset: {row.default}.".strip()
    keys = [_code(row.keys)] if row.kind == "mapped" else []
    return [_code(_short(row.names)), *keys, note.replace("|", "\\|")]


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _short(names: tuple[str, ...]) -> list[str]:
    """Return the names except ones that differ in the first word only, which is the name of a role."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(name.partition(".")[2] or name, name)
    return list(first.values())


if __name__ == "__main__":
    for each in systems():
        path = page_path(each)
        path.write_text(with_tables(path.read_text(), each))
