"""Format a combination of changes, and the totals of pools and hosts, as text and as JSON data. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gkd.footprint.combination import HOST, Combination, Step
from gkd.footprint.limits import GIB, gib
from gkd.footprint.rank import HOST_PARTS, UNCOUNTED_PARTS
from gkd.footprint.totals import HostTotal, PoolTotal, host_shortage
from gkd.memory.remedy import as_yaml

_LARGEST = 3  # parts that are named as the bound


def combination_lines(found: Combination, command: str = "") -> list[str]:
    """Return lines with each change and its effect, and the overrides to paste.

    Args:
        command: that the overrides are appended to.
    """
    rows = [("settings as given", found.steps[0]), *_rows(found.steps[1:])]
    rows += [(f"{text} (more GPUs)", step) for text, step in _rows(found.more_gpus)]
    width = max(len(text) for text, _ in rows)
    lines = [
        "changes, in the order of docs/memory.md (GiB; peak: on the actor's fullest GPU; short: until "
        f"{found.steps[0].config.memory.margin:.0%} of it are free, or what an engine or a host lacks):",
        *(f"  {text:{width}}  peak {_gib(step.peak_bytes):>7}  {_short(step)}" for text, step in rows),
    ]
    if not found.fits:
        last = found.steps[-1]
        lines.append(
            f"these changes are not enough on these GPUs: {gib(last.short_bytes)} are missing, at a peak of "
            f"{gib(last.peak_bytes)} on the actor's fullest GPU. Bound: {bound(last)}"
        )
    if found.fits or found.more_gpus:
        lines.append("all changes together, to paste:")
        lines.append("  " + " ".join(filter(None, (command, *found.overrides))))
    return lines


def bound(step: Step) -> str:
    """Return what is short, with the largest parts of the rank."""
    (role, need), _ = max(step.short.items(), key=lambda item: item[1])
    if (role, need) == HOST:
        return "the memory of the host"
    rank = max((part for part in step.footprints if part.role == role), key=lambda part: part.total_bytes)
    on_device = [(size, name) for name, size in rank.parts.items() if name not in (*HOST_PARTS, *UNCOUNTED_PARTS)]
    largest = ", ".join(f"{name} {gib(size)}" for size, name in sorted(on_device, reverse=True)[:_LARGEST])
    return f"{need} of {role} rank {rank.rank} ({largest})"


def totals_lines(pools: Sequence[PoolTotal], hosts: Sequence[HostTotal], host_bytes: int | None) -> list[str]:
    """Return a line for each pool and each host."""
    lines = [
        f"GPUs of the pool {pool.pool}: {pool.n_gpus}, at most {gib(pool.largest)} each, {gib(pool.total)} together"
        for pool in pools
    ]
    for host in hosts:
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in sorted(host.parts.items(), key=lambda it: -it[1]))
        verdict = ""
        if host_bytes is not None:
            verdict = f" of {gib(host_bytes)}, {'it fits' if host.total <= host_bytes else 'TOO LARGE'}"
        lines.append(f"host memory of {host.host}: {gib(host.total)}{verdict} ({parts})")
    return lines


def host_problems(hosts: Sequence[HostTotal], host_bytes: int | None) -> list[str]:
    """Return a line for each host whose memory does not suffice."""
    return [
        f"{host.host} needs {gib(host.total)} of host memory, {gib(host.total - host_bytes)} more than it has"
        for host in hosts
        if host_bytes is not None and host.total > host_bytes
    ]


def combination_json(found: Combination) -> dict[str, Any]:
    """Return JSON data; sizes in bytes."""
    steps = [
        {"changes": dict(step.changes), "peak_bytes": step.peak_bytes, "short_bytes": max(0, step.short_bytes)}
        for step in (*found.steps, *found.more_gpus)
    ]
    return {"fits": found.fits, "overrides": found.overrides, "more_gpus": bool(found.more_gpus), "steps": steps}


def totals_json(pools: Sequence[PoolTotal], hosts: Sequence[HostTotal], host_bytes: int | None) -> dict[str, Any]:
    """Return JSON data; sizes in bytes."""
    return {
        "pools": [
            {"pool": pool.pool, "n_gpus": pool.n_gpus, "largest_bytes": pool.largest, "total_bytes": pool.total}
            for pool in pools
        ],
        "hosts": [{"host": host.host, "parts": host.parts, "total_bytes": host.total} for host in hosts],
        "host_bytes": host_bytes,
        "host_fits": None if host_bytes is None else host_shortage(hosts, host_bytes) <= 0,
    }


def _rows(steps: Sequence[Step]) -> Iterator[tuple[str, Step]]:
    for step in steps:
        yield "+ " + " ".join(f"{key}={as_yaml(value)}" for key, value in step.changes.items()), step


def _short(step: Step) -> str:
    return f"short {_gib(step.short_bytes):>7}" if step.short_bytes > 0 else "fits"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f}"
