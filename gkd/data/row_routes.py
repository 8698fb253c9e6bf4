"""Find the teacher that a row of a prompt file names: its route, see `gkd.config.routes`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gkd.config.schema_teacher import TeacherConfig
from gkd.errors import ConfigError
from gkd.log import get_logger

log = get_logger("data")


class RowRoutes:
    """Return the route of each row, and count them.

    Args:
        column: data.teacher_key.
    """

    def __init__(self, teacher: TeacherConfig, column: str) -> None:
        self._names, self._default, self._column = sorted(teacher.routes), teacher.default_route, column
        self._index = {name: i for i, name in enumerate(self._names)}
        self._by_default = 0
        self._counts = Counter[str]()

    def of(self, row: Mapping[str, Any], where: str) -> int:
        """Return the index of a row's route. Raises ConfigError: it names none, and there is no teacher.default_route.

        Args:
            where: file and line of the row.
        """
        if not self._names:
            return 0
        found = row.get(self._column)
        name = str(found)
        if found is None or name not in self._index:
            if not self._default:
                value = f"has {found!r}" if self._column in row else f"has only the columns {sorted(row)}"
                problem = f"{where} {value}, and teacher.routes are {', '.join(self._names)}."
                fix = "correct the row, add the route, or set teacher.default_route."
                raise ConfigError("data.teacher_key", self._column, problem, fix)
            name, self._by_default = self._default, self._by_default + 1
        self._counts[name] += 1
        return self._index[name]

    def log(self, key: str) -> None:
        """Log the rows of each route, and how many of them teacher.default_route has taken."""
        if self._names:
            counts = ", ".join(f"{name} {self._counts[name]}" for name in self._names)
            log.info("%s: rows by route: %s; %d by teacher.default_route", key, counts, self._by_default)
