"""`python -m gkd.tools.config_page`: write docs/configuration.md from the config's own comments."""

from __future__ import annotations

from pathlib import Path

from gkd.config.load import describe_keys

_HEAD = """# Configuration

Every key, its type, its default and what it does. Written by `python -m gkd.tools.config_page` from the comments in
`gkd/config/schema.py`; the same text is printed by `python -m gkd.main_gkd --help`. A YAML file names only what differs
from the defaults; `key=value` arguments win over the file.
"""


def config_page() -> str:
    """The page as Markdown, one table a section."""
    lines = [_HEAD]
    section = ""
    for key, kind, default, text in describe_keys():
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines += ["", f"## {section}", "", "| key | type | default | what it does |", "|---|---|---|---|"]
        lines.append(f"| `{key}` | {kind} | `{default!r}` | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path("docs/configuration.md").write_text(config_page())
