"""Ranks that do not answer: ask every node for their stacks, and tell those that wait from those they wait for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gkd.cluster.progress import Progress
from gkd.cluster.stacks import RankStack, stacks_here

_NODES_S = 30.0  # a process has to start on each
_NAMED = 8  # ranks told one by one


@dataclass(frozen=True, slots=True)
class HangReport:
    """Who hangs."""

    lines: list[str]  # for people: the ranks that others wait for, and where they are
    telling: str  # stacks of the first few of those
    stacks: str  # of all ranks, whole


def hang_report(run: str, names: Sequence[str], progress: Mapping[str, Progress], late: Sequence[str]) -> HangReport:
    """Takes the stacks of all ranks of this run; seconds, `_NODES_S` at the worst. Arguments as of `describe`.

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
    """The report, from what is known.

    Args:
        names: of the ranks that there should be, as in `stacks.RANK_ENV`.
        progress: of those that have told how far they are.
        late: whose answers are missing, see `RankTimeout`.
        silent: nodes that could not be asked.
    """
    found = {stack.rank for stack in stacks}
    waited_for = [stack for stack in stacks if _is_late(stack.rank, late, found | set(names))]
    # A child that cannot be asked, as a helper of a library, says nothing of its rank.
    telling = [stack for stack in waited_for if stack.text or not stack.is_child]
    waiting = [stack for stack in telling if stack.in_collective]
    idle = [stack for stack in telling if stack.is_idle]
    groups = _groups([stack for stack in telling if not stack.in_collective and not stack.is_idle], progress)
    others = [stack for stack in stacks if stack not in waited_for]
    lines = [f"node {node} did not say where its ranks are" for node in silent]
    # On a silent node there may be ranks that nobody has seen.
    missing = [name for name in names if name not in found] if not silent else []
    lines += _limited([f"{name}: has no process: Ray has not started it" for name in missing])
    lines += _limited([_group_line(group, progress) for group in groups])
    if waiting:
        lines.append(f"{_counted(waiting)} wait for others, the first: {_line(waiting[0], progress)}")
    if idle:
        lines.append(f"{_counted(idle)} wait for their next call")
    if others:
        lines.append(f"{_counted(others)} are not late")
    firsts = [group[0] for group in groups] or waiting[:1]
    shown = [_head(stack, progress) + stack.shown() for stack in firsts[:_NAMED]]
    return HangReport(lines, "\n".join(shown), "\n".join(_head(s, progress) + s.text for s in stacks))


def _is_late(rank: str, late: Sequence[str], ranks: Collection[str]) -> bool:
    """True for all of them if one of the late ones is called by a name that no rank has."""
    in_words = [{word for word in ranks if re.search(rf"\b{re.escape(word)}\b", name)} for name in late]
    return not all(in_words) or not late or any(rank in words for words in in_words)


def _groups(stacks: Sequence[RankStack], progress: Mapping[str, Progress]) -> list[list[RankStack]]:
    """Those at the same place together; first those that cannot answer, then the small groups: what many ranks wait
    for, by whatever call, few do not.
    """
    groups: dict[str, list[RankStack]] = defaultdict(list)
    for stack in sorted(stacks, key=lambda stack: -progress[stack.rank].for_s if stack.rank in progress else 0.0):
        groups[stack.where()].append(stack)
    return sorted(groups.values(), key=lambda group: (not group[0].problem, len(group)))


def _group_line(group: Sequence[RankStack], progress: Mapping[str, Progress]) -> str:
    first = _line(group[0], progress)
    return first if len(group) == 1 else f"{_counted(group)}, the first: {first}"


def _line(stack: RankStack, progress: Mapping[str, Progress]) -> str:
    at = progress.get(stack.rank)
    phase = f"{at.phase} for {at.for_s:.0f} s" if at is not None else "has not said how far it is"
    return f"{stack.rank} ({stack.host}, pid {stack.pid}): {phase}; {stack.where()}"


def _counted(stacks: Sequence[RankStack]) -> str:
    names = sorted({stack.rank for stack in stacks})
    return f"{len(names)} ({', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''})"


def _head(stack: RankStack, progress: Mapping[str, Progress]) -> str:
    return f"== {_line(stack, progress)}\n   {stack.command}\n"


def _limited(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _NAMED else [*lines[:_NAMED], f"... and {len(lines) - _NAMED} more"]


def _all_stacks(run: str) -> tuple[list[RankStack], list[str]]:
    """(stacks, addresses of nodes that did not answer)."""
    ask: Any = ray.remote(num_cpus=0, max_retries=0)(stacks_here)
    refs = {
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(run): node
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
