"""The ranking for people: a table, the lines to paste, a JSON object, a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gkd.config import Config
from gkd.schedule import STREAM
from gkd.split.outcome import POOLS
from gkd.split.search import Candidate, Ranking

_HEADS = ("", "scheduler", "actor", "rollout", "teacher", "step s", "tokens/s", "speed-up", "bound by", "busy", "stale")


def table(ranking: Ranking, own: Candidate, top: int) -> str:
    """The best ones, and the run's own split last; busy: share of rollout, teacher and actor GPUs' time."""
    rows = [_row(str(place), c, own) for place, c in enumerate(ranking.candidates[:top], start=1)]
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
        "not known" if candidate.too_large is None else "too small" if candidate.too_large else "fits",
    )


def paste(candidate: Candidate, config: Config, gpus_per_worker: int) -> str:
    """The YAML that makes a run use this split, and the teacher server's flags as a comment."""
    split, scheduler = candidate.split, candidate.scheduler
    bound = [f"  max_staleness: {config.trainer.max_staleness}"] if scheduler == STREAM else []
    lines = [
        "trainer:",
        f"  scheduler: {scheduler}",
        *bound,
        f"  nnodes: {split.actor.nnodes}",
        f"  n_gpus_per_node: {split.actor.per_node}",
        "rollout:",
        f"  nnodes: {split.rollout.nnodes}",
        f"  n_gpus_per_node: {split.rollout.per_node}",
    ]
    if split.teacher_gpus:
        flags = f"--n-workers {split.workers}" + (f" --tensor-parallel-size {gpus_per_worker}" * (gpus_per_worker > 1))
        lines.append(f"# teacher server: python -m teacher_server serve ... {flags}   # {split.teacher_gpus} GPUs")
    return "\n".join(lines)


def as_json(ranking: Ranking, own: Candidate, run: dict[str, Any]) -> dict[str, Any]:
    """Everything, the best first.

    Args:
        run: of the run that was measured; see `gkd.tools.split`.
    """
    return {
        "run": run,
        "n_splits": ranking.n_splits,
        "own": dataclasses.asdict(own),
        "ranking": [dataclasses.asdict(candidate) for candidate in ranking.candidates],
    }


def plot(ranking: Ranking, own: Candidate, file: Path, top: int) -> None:
    """PNG: what a step of each of the best splits is made of, as the loop waits for it, and how busy each pool is.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [*ranking.candidates[:top], own]
    names = [_short(c) + (" (own)" if c is own else "") for c in shown]
    places = range(len(shown))
    figure = Figure(figsize=(12, 1.5 + 0.35 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    waits, busy = figure.subplots(1, 2, sharey=True)
    colours = dict(zip((*POOLS, "other"), ("tab:blue", "tab:orange", "tab:green", "lightgrey"), strict=True))
    left = [0.0] * len(shown)
    for pool in (*POOLS, "other"):
        parts = [_waited_s(c, pool) for c in shown]
        waits.barh(
            places, parts, left=left, color=colours[pool], label=pool if pool == "other" else f"waits for {pool}"
        )
        left = [a + b for a, b in zip(left, parts, strict=True)]
    for offset, pool in enumerate(POOLS):
        at = [place + 0.27 * (offset - 1) for place in places]
        busy.barh(at, [c.outcome.busy[pool] for c in shown], height=0.25, color=colours[pool], label=pool)
    waits.set_yticks(list(places), names)
    waits.invert_yaxis()
    waits.set_xlabel("predicted step, s")
    busy.set_xlabel("share of the time that the pool is busy")
    busy.set_xlim(0, 1)
    for axes in (waits, busy):
        axes.legend(loc="lower right", fontsize="small")
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(file, format="png", dpi=110)


def _short(candidate: Candidate) -> str:
    s = candidate.split
    return f"{candidate.scheduler}  {s.actor.n_gpus} / {s.rollout.n_gpus} / {s.teacher_gpus or 'elsewhere'}"


def _waited_s(candidate: Candidate, pool: str) -> float:
    outcome = candidate.outcome
    if pool == "other":
        return outcome.step_s * max(0.0, 1 - sum(outcome.waited.values()))
    return outcome.step_s * outcome.waited[pool]


def notes(texts: Sequence[str]) -> str:
    return "\n".join(f"assumed: {text}" for text in texts)
