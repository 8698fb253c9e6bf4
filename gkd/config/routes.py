"""Name the teachers of a run: one route per entry of `teacher.routes`, or a single one without a name.

A row of the data names its route in the column `data.teacher_key`. A `Prompt` and its rollouts carry the route's index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from gkd.config.schema_sections import Sections
from gkd.config.schema_teacher import RouteConfig, TeacherConfig


@dataclass(frozen=True, slots=True)
class Route:
    """One teacher.

    Args:
        name: key in `teacher.routes`; empty means the only teacher of the run.
        teacher: the section `teacher` with what the route sets itself.
        weight: factor of the loss of its tokens.
        own: keys that the route sets itself.
    """

    name: str
    teacher: TeacherConfig
    weight: float = 1.0
    own: frozenset[str] = frozenset()

    def key(self, name: str) -> str:
        """Return the dotted key that a value of `teacher` comes from."""
        return f"teacher.routes.{self.name}.{name}" if name in self.own else f"teacher.{name}"

    @property
    def label(self) -> str:
        """Return the route for a message, like `teacher.routes.math`; `teacher` for the only one."""
        return f"teacher.routes.{self.name}" if self.name else "teacher"


def routes_of(config: Sections) -> tuple[Route, ...]:
    """Return the teachers by name, so that the order in the YAML does not matter; at least one."""
    teacher = config.teacher
    if not teacher.routes:
        return (Route("", teacher),)
    return tuple(_route(name, each, teacher) for name, each in sorted(teacher.routes.items()))


def _route(name: str, entry: RouteConfig, teacher: TeacherConfig) -> Route:
    own = {key: value for key in _INHERITED if (value := getattr(entry, key)) is not None}
    return Route(name, replace(teacher, **own), entry.weight, frozenset(own))


def kept_on_resume(routes: Mapping[str, RouteConfig]) -> dict[str, tuple[float | None, float]]:
    """Return what a resumed run must keep of `teacher.routes`; a server may move."""
    return {name: (route.temperature, route.weight) for name, route in sorted(routes.items())}


_INHERITED = tuple(item.name for item in fields(RouteConfig) if item.name != "weight")
