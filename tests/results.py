"""Write the JSON files of `docs/results`: one row of a table per line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MOST_CHARACTERS = 400  # of an object with others inside, on one line


def write_results(file: Path, value: Any, *, levels: int = 6) -> None:
    """Write a JSON file in one step, so that it is whole whenever the writer is killed; see `as_rows`."""
    partial = file.with_name(f"{file.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(as_rows(value, levels) + "\n")
    partial.replace(file)


def as_rows(value: Any, levels: int, indent: int = 0) -> str:
    """Return JSON text whose rows take one line each.

    Args:
        levels: of objects and lists that may be opened, one entry a line. Deeper ones take one line, as do short ones
            and those with nothing but numbers and texts inside. 6 opens the rows of tables in a file of `Part`s.
    """
    line = json.dumps(value)
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    is_row = not any(isinstance(each, dict | list | tuple) for each in inner)
    if levels == 0 or is_row or len(line) <= _MOST_CHARACTERS:
        return line
    names = [f"{json.dumps(str(key))}: " for key in value] if isinstance(value, dict) else [""] * len(inner)
    pad = " " * (indent + 1)
    rows = [f"{pad}{name}{as_rows(each, levels - 1, indent + 1)}" for name, each in zip(names, inner, strict=True)]
    start, end = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([start, ",\n".join(rows), " " * indent + end])
