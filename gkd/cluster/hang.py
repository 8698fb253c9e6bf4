"""Diagnose a hang: collect the stacks of all ranks, and separate waiting ranks from the ranks that they wait for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gkd.cluster.stacks import RankStack, stacks_here
from gkd.spans import Progress

_NODES_S = 30.0  # includes the start of a process on each node
_NAMED = 8  # ranks that are listed one by one


@dataclass(frozen=True, slots=True)
class HangReport:
    """The ranks that hang, with their stacks."""

    lines: list[str]  # human-readable: the ranks that others wait for, and their location in the code
    excerpt: str  # stacks of the first few of these ranks
    stacks: str  # complete stacks of all ranks


def hang_report(run: str, names: Sequence[str], progress: Mapping[str, Progress], late: Sequence[str]) -> HangReport:
    """Collect the stacks of all ranks of this run, and describe them as `describe` does.

    Takes seconds, at most `_NODES_S`.

    Args:
        run: see `stacks.rank_env`.
    """
    stacks, silent = _all_stacks(run)
    return describe(names, progress, late, stacks, silent)


def describe(
    names: Sequence[str],
    progress: Mapping[str, Progress],
    late: Sequence[str],
    stacks: Sequence[RankStack],
    silent: Sequence[str] = (),
) -> HangReport:
    """Make the report.

    Args:
        names: of all expected ranks, as in `stacks.RANK_ENV`.
        progress: of the ranks that have reported it.
        late: names of the ranks or calls without a reply, see `RankTimeout`.
        silent: nodes that did not reply.
    """
    found = {stack.rank for stack in stacks}
    late_stacks = [stack for stack in stacks if _is_late(stack.rank, late, found | set(names))]
    # A child without a stack, such as a helper process of a library, does not show what its rank does.
    candidates = [stack for stack in late_stacks if stack.text or not stack.is_child]
    waiting = [stack for stack in candidates if stack.in_collective]
    idle = [stack for stack in candidates if stack.is_idle]
    groups = _groups([stack for stack in candidates if not stack.in_collective and not stack.is_idle], progress)
    others = [stack for stack in stacks if stack not in late_stacks]
    lines = [f"node {node}: no stacks received" for node in silent]
    # Ranks without a stack may be on a silent node.
    missing = [name for name in names if name not in found] if not silent else []
    lines += _limited([f"{name}: no process (not started by Ray)" for name in missing])
    lines += _limited([_group_line(group, progress) for group in groups])
    if waiting:
        lines.append(f"waiting in a collective: {_counted(waiting)}; first: {_line(waiting[0], progress)}")
    if idle:
        lines.append(f"idle: {_counted(idle)}")
    if others:
        lines.append(f"not late: {_counted(others)}")
    firsts = [group[0] for group in groups] or waiting[:1]
    shown = [_head(stack, progress) + stack.shown() for stack in firsts[:_NAMED]]
    return HangReport(lines, "\n".join(shown), "\n".join(_head(s, progress) + s.text for s in stacks))


def _is_late(rank: str, late: Sequence[str], ranks: Collection[str]) -> bool:
    """Return whether the rank may be late; true for all ranks if a late name matches no rank."""
    in_words = [{word for word in ranks if re.search(rf"\b{re.escape(word)}\b", name)} for name in late]
    return not all(in_words) or not late or any(rank in words for words in in_words)


def _groups(stacks: Sequence[RankStack], progress: Mapping[str, Progress]) -> list[list[RankStack]]:
    """Group stacks by location in the code: processes without a stack first, then the smallest groups.

    Many ranks at one location probably wait for the few that are elsewhere.
    """
    groups: dict[str, list[RankStack]] = defaultdict(list)
    for stack in sorted(stacks, key=lambda stack: -progress[stack.rank].for_s if stack.rank in progress else 0.0):
        groups[stack.where()].append(stack)
    return sorted(groups.values(), key=lambda group: (not group[0].problem, len(group)))


def _group_line(group: Sequence[RankStack], progress: Mapping[str, Progress]) -> str:
    first = _line(group[0], progress)
    return first if len(group) == 1 else f"{_counted(group)}; first: {first}"


def _line(stack: RankStack, progress: Mapping[str, Progress]) -> str:
    at = progress.get(stack.rank)
    phase = f"{at.phase} for {at.for_s:.0f} s" if at is not None else "no progress reported"
    return f"{stack.rank} ({stack.host}, pid {stack.pid}): {phase}; {stack.where()}"


def _counted(stacks: Sequence[RankStack]) -> str:
    names = sorted({stack.rank for stack in stacks})
    return f"{len(names)} ({', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''})"


def _head(stack: RankStack, progress: Mapping[str, Progress]) -> str:
    return f"== {_line(stack, progress)}\n   {stack.command}\n"


def _limited(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _NAMED else [*lines[:_NAMED], f"... and {len(lines) - _NAMED} more"]


def _all_stacks(run: str) -> tuple[list[RankStack], list[str]]:
    """Return (stacks, addresses of nodes that did not reply)."""
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(stacks_here)
    refs = {
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(run): node
        for node in ray.nodes()
        if node["Alive"]
    }
    done, late = ray.wait(list(refs), num_returns=len(refs), timeout=_NODES_S)
    stacks: list[RankStack] = []
    silent = [refs[ref]["NodeManagerAddress"] for ref in late]
    for ref in done:
        try:
            stacks += ray.get(ref)
        except RayError as error:
            silent.append(f"{refs[ref]['NodeManagerAddress']} ({error})")
    return stacks, silent
