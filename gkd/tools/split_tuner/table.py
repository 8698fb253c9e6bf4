"""Print a ranking: a table, the settings of the best split, a JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from gkd.config.schema import Config
from gkd.config.schema_trainer import STREAM
from gkd.tools.split_tuner.layout import Hardware
from gkd.tools.split_tuner.outcome import POOLS
from gkd.tools.split_tuner.search import Candidate, Ranking

_HEADS = ("", "scheduler", "actor", "rollout", "teacher", "step s", "tokens/s", "speed-up", "bound by", "busy", "stale")


def table(ranking: Ranking, own: Candidate, top: int) -> str:
    """Return the table of the best splits, with the run's own split last.

    busy: share of the time that rollout, teacher and actor GPUs work.
    """
    rows = [_row(str(rank), c, own) for rank, c in enumerate(ranking.candidates[:top], start=1)]
    rows.append(_row("own", own, own))
    if all(c.too_large is None for c in ranking.candidates):
        heads: tuple[str, ...] = _HEADS
    else:
        heads = (*_HEADS, "memory")
    rows = [row[: len(heads)] for row in rows]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str, candidate: Candidate, own: Candidate) -> tuple[str, ...]:
    split, outcome = candidate.split, candidate.outcome
    teacher = f"{split.teacher_gpus}" if split.teacher_gpus else "elsewhere"
    busy = "/".join(f"{100 * outcome.busy[pool]:.0f}" for pool in POOLS) + " %"
    stale = " ".join(f"{age}:{100 * share:.0f}%" for age, share in outcome.staleness.items())
    bound_by = f"{outcome.bound_by} {100 * outcome.waited[outcome.bound_by]:.0f}%"
    return (
        name,
        candidate.scheduler,
        str(split.actor),
        str(split.rollout),
        teacher,
        f"{outcome.step_s:.3g}",
        f"{outcome.response_tokens_per_s:.4g}",
        f"{own.outcome.step_s / outcome.step_s:.2f}x",
        bound_by,
        busy,
        stale,
        "unknown" if candidate.too_large is None else "too small" if candidate.too_large else "fits",
    )


def settings_of(candidate: Candidate, config: Config, hardware: Hardware) -> str:
    """Return the settings of this split as `key=value` arguments, with comments on what the user has to choose."""
    split = candidate.split
    settings: dict[str, object] = {
        "trainer.scheduler": candidate.scheduler,
        "trainer.nnodes": split.actor.nnodes,
        "trainer.n_gpus_per_node": split.actor.per_node,
        "rollout.nnodes": split.rollout.nnodes,
        "rollout.n_gpus_per_node": split.rollout.per_node,
    }
    if candidate.scheduler == STREAM:
        settings["trainer.max_staleness"] = config.trainer.max_staleness
    if config.teacher.max_in_flight:
        settings["teacher.max_in_flight"] = 0
    lines = [" ".join(f"{key}={value}" for key, value in settings.items())]
    if not config.cluster.ray_address and split.actor.n_gpus + split.rollout.n_gpus > hardware.per_node:
        lines.append("# the pools are on several nodes: start a Ray cluster, and set cluster.ray_address")
    if config.cluster.gpus:
        lines.append(f"# cluster.gpus is {list(config.cluster.gpus)}: set it to the GPUs of this split, or remove it")
    if split.teacher_gpus:
        size = hardware.gpus_per_worker
        flags = f"--n-workers {split.workers}" + f" --tensor-parallel-size {size}" * (size > 1)
        lines.append(f"# teacher server: python -m teacher_server serve ... {flags}   # {split.teacher_gpus} GPUs")
    return "\n".join(lines)


def left_out(ranking: Ranking) -> list[str]:
    """Return why checked splits are missing in the ranking, one line per reason."""
    lines = [
        f"excluded: {refused.n} splits under {refused.scheduler}, the first because of {refused.first}"
        for refused in ranking.refused
    ]
    if ranking.n_too_large:
        n_shown = sum(not c.fits for c in ranking.candidates)
        which = f"{ranking.n_too_large} do not fit" if ranking.candidates[0].fits else "none fits"
        lines.append(f"memory: of {ranking.n_looked_at} checked splits {which}; {n_shown} of these are in the ranking")
    return lines


def as_json(ranking: Ranking, own: Candidate, run: dict[str, Any]) -> dict[str, Any]:
    """Return everything, the best split first.

    Args:
        run: facts of the measured run, see `gkd.tools.split`.
    """
    return {
        "run": run,
        "n_splits": ranking.n_splits,
        "n_looked_at": ranking.n_looked_at,
        "n_too_large": ranking.n_too_large,
        "refused": [{"scheduler": r.scheduler, "n": r.n, "first": str(r.first)} for r in ranking.refused],
        "own": dataclasses.asdict(own),
        "ranking": [dataclasses.asdict(candidate) for candidate in ranking.candidates],
    }


def notes(texts: Sequence[str]) -> str:
    return "\n".join(f"assumed: {text}" for text in texts)
