"""Put the sequences of a chunk into requests: several short sequences cost the client little more than one."""

from __future__ import annotations

from collections.abc import Sequence

from gkd.types import Rollout

_MOST_TOKENS = 4096  # limit of a request with several sequences: half a batch of the teacher server's default


def grouped(rollouts: Sequence[Rollout], n_per_request: Sequence[int]) -> list[list[int]]:
    """Return the indices of the sequences of each request.

    A request has one route, and its rollouts have the same number of `top_ids`, or none.

    Args:
        n_per_request: by route, most sequences of a request.
    """
    groups: list[list[int]] = []
    open_groups: dict[tuple[int, int], tuple[list[int], int]] = {}  # its indices and tokens
    for index, rollout in enumerate(rollouts):
        n_given = 0 if rollout.top_ids is None else rollout.top_ids.shape[1]
        n_tokens = rollout.for_teacher().n_tokens
        key = rollout.route, n_given
        group, held = open_groups.get(key, ([], 0))
        if not group or len(group) == n_per_request[rollout.route] or held + n_tokens > _MOST_TOKENS:
            group, held = [], 0
            groups.append(group)
        group.append(index)
        open_groups[key] = group, held + n_tokens
    return groups
