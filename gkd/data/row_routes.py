"""Choose the teacher of each row by a column: data.teacher_key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gkd.config.schema_teacher import TeacherConfig
from gkd.data.conversation import as_text
from gkd.errors import ConfigError
from gkd.log import get_logger

log = get_logger("data")

_DEFAULT = "default"  # name of the route that takes rows of no other route


class RowRoutes:
    """Return the route of each row, and count them. `column` is data.teacher_key."""

    def __init__(self, teacher: TeacherConfig, column: str) -> None:
        self._names = sorted(teacher.routes)
        self._column = column
        self._index = {name: i for i, name in enumerate(self._names)}
        self._by_default = 0
        self._counts = Counter[str]()

    def of(self, row: Mapping[str, Any], where: str) -> int:
        """Return the index of a row's route. Raises ConfigError: it names none, and there is no route `default`."""
        if not self._names:
            return 0
        cell = row.get(self._column)
        name = as_text(cell)
        if cell is None or name not in self._index:
            if _DEFAULT not in self._index:
                value = f"has {cell!r}" if self._column in row else f"has only the columns {sorted(row)}"
                problem = f"{where} {value}, and teacher.routes are {', '.join(self._names)}."
                fix = f"correct the row, add the route, or a route {_DEFAULT} for all other rows."
                raise ConfigError("data.teacher_key", self._column, problem, fix)
            name = _DEFAULT
            self._by_default += 1
        self._counts[name] += 1
        return self._index[name]

    def log(self, key: str) -> None:
        """Log the rows of each route, and how many of them have no route of their own."""
        if self._names:
            counts = ", ".join(f"{name} {self._counts[name]}" for name in self._names)
            log.info("%s: rows by route: %s; %d without a route of their own", key, counts, self._by_default)
