"""`python -m gkd.tools.config_page`: write docs/configuration.md from the declarations in `gkd.config.schema`."""

from __future__ import annotations

import re
from pathlib import Path

from gkd.config.schema_sections import DeclaredKey, all_keys

_HEAD = """# Configuration

All keys with type, default, limits and meaning. `python -m gkd.tools.config_page` writes this page from
`gkd/config/schema*.py`; `python -m gkd.main_gkd --help` prints the same text. A YAML file lists only keys that differ
from their defaults; `key=value` arguments override the file.

Column *resume*: whether a resumed run may change the key. Any other change is refused, see
[operations.md](operations.md#resume).
"""
_COLUMNS = "| key | type | default | limits | resume | meaning |\n|---|---|---|---|---|---|"


def config_page() -> str:
    """Return the page as Markdown, one table per section."""
    lines, section = [_HEAD], ""
    for each in all_keys().values():
        if each.name.partition(".")[0] != section:
            section = each.name.partition(".")[0]
            lines += ["", f"## {section}", "", _COLUMNS]
        lines.append("| " + " | ".join(map(_cell, _row(each))) + " |")
    return "\n".join(lines) + "\n"


def _row(each: DeclaredKey) -> tuple[str, ...]:
    key = each.key
    resume = key.resume if isinstance(key.resume, str) else "yes" if key.resume else "no"
    return f"`{each.name}`", each.type, f"`{each.default!r}`", key.all_limits(), resume, key.help


def _cell(text: str) -> str:
    """Return the text with escaped columns, and with links for the names of pages."""
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text.replace("|", r"\|"))


if __name__ == "__main__":
    Path("docs/configuration.md").write_text(config_page())
