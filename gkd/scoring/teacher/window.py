"""Divide the sequences in flight at the teacher server among the data-parallel groups."""

from __future__ import annotations

from typing import NamedTuple

from gkd.config.schema_teacher import TeacherConfig
from gkd.scoring.teacher.info import TeacherInfo
from teacher_server.wire.protocol import MAX_SEQUENCES

_REQUESTS_IN_FLIGHT = 4


class Window(NamedTuple):
    """The share of one data-parallel group."""

    n_in_flight: int  # sequences
    n_per_request: int = 1  # most sequences of a request


def window_of_group(teacher: TeacherConfig, info: TeacherInfo, n_groups: int) -> Window:
    """Return each group's share; at least one sequence.

    Without teacher.max_in_flight the shares are rounded up, so that together they keep the server's workers busy;
    with it they are rounded down.
    """
    limit = teacher.max_in_flight
    n_in_flight = max(1, limit // n_groups) if limit else -(-info.n_streams // n_groups)
    # Several requests in flight: the server computes one while this side reads the reply to another.
    several = min(max(1, n_in_flight // _REQUESTS_IN_FLIGHT), MAX_SEQUENCES)
    return Window(n_in_flight, several if info.protocol_version >= 3 else 1)


def throttle_warning(teacher: TeacherConfig, info: TeacherInfo) -> str:
    """Return a warning if teacher.max_in_flight leaves the server's workers idle; else an empty string."""
    if not 0 < teacher.max_in_flight < info.n_streams:
        return ""
    return f"teacher.max_in_flight={teacher.max_in_flight} slows the teacher down; set 0, or at least {info.n_streams}"
