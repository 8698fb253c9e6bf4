"""Divide the sequences in flight at the teacher server among the data-parallel groups, and put them into requests.

Several short sequences in a request cost the client little more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gkd.config.schema_teacher import TeacherConfig
from gkd.scoring.teacher.info import TeacherInfo
from gkd.types import Rollout
from teacher_server.vision.images import EncodedImage
from teacher_server.wire.protocol import MAX_ENTRIES, MAX_IMAGES, MAX_IMAGES_BYTES, MAX_SEQUENCES

_REQUESTS_IN_FLIGHT = 4
_MOST_TOKENS = 4096  # limit of a request with several sequences: half a batch of the teacher server's default


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
    return Window(n_in_flight, several if info.is_server else 1)


def throttle_warning(teacher: TeacherConfig, info: TeacherInfo) -> str:
    """Return a warning if teacher.max_in_flight leaves the server's workers idle; else an empty string."""
    if not 0 < teacher.max_in_flight < info.n_streams:
        return ""
    return f"teacher.max_in_flight={teacher.max_in_flight} slows the teacher down; set 0, or at least {info.n_streams}"


def grouped(rollouts: Sequence[Rollout], n_per_request: Sequence[int], k: int = 1) -> list[list[int]]:
    """Return the indices of the sequences of each request.

    A request has one route, and its rollouts have the same number of `top_ids`, or none.

    Args:
        n_per_request: by route, most sequences of a request.
        k: entries of a row, of which a reply holds `MAX_ENTRIES`.
    """
    most_tokens = min(_MOST_TOKENS, MAX_ENTRIES // k)
    groups: list[list[int]] = []
    # Indices, tokens and distinct images of the last request of each kind.
    open_groups: dict[tuple[int, int], tuple[list[int], int, set[EncodedImage]]] = {}
    for index, rollout in enumerate(rollouts):
        n_given = 0 if rollout.top_ids is None else rollout.top_ids.shape[1]
        n_tokens = rollout.for_teacher().n_tokens
        key = rollout.route, n_given
        group, held, images = open_groups.get(key, ([], 0, set[EncodedImage]()))
        images = images | {*rollout.images}
        is_full = len(images) > MAX_IMAGES or sum(image.n_bytes for image in images) > MAX_IMAGES_BYTES
        if not group or is_full or len(group) == n_per_request[rollout.route] or held + n_tokens > most_tokens:
            group = []
            held = 0
            images = {*rollout.images}
            groups.append(group)
        group.append(index)
        open_groups[key] = group, held + n_tokens, images
    return groups
