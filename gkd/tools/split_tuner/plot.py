"""Plot a ranking: the parts of a step for each of the best splits, and how busy each pool is."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gkd.tools.split_tuner.outcome import POOLS
from gkd.tools.split_tuner.search import Candidate, Ranking


def plot(ranking: Ranking, own: Candidate, file: Path, top: int) -> None:
    """Write a PNG: the time that the loop waits for each pool in a step, and how busy each pool is.

    Raises:
        OSError: it cannot be written.
    """
    shown = [*ranking.candidates[:top], own]
    names = [_short(c) + (" (own)" if c is own else "") for c in shown]
    ys = range(len(shown))
    figure = Figure(figsize=(12, 1.5 + 0.35 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    waits, busy = figure.subplots(1, 2, sharey=True)
    colors = dict(zip((*POOLS, "other"), ("tab:blue", "tab:orange", "tab:green", "lightgrey"), strict=True))
    left = [0.0] * len(shown)
    for pool in (*POOLS, "other"):
        parts = [_waited_s(c, pool) for c in shown]
        waits.barh(ys, parts, left=left, color=colors[pool], label=pool if pool == "other" else f"waits for {pool}")
        left = [a + b for a, b in zip(left, parts, strict=True)]
    for offset, pool in enumerate(POOLS):
        at = [y + 0.27 * (offset - 1) for y in ys]
        busy.barh(at, [c.outcome.busy[pool] for c in shown], height=0.25, color=colors[pool], label=pool)
    waits.set_yticks(list(ys), names)
    waits.invert_yaxis()
    waits.set_xlabel("predicted step, s")
    busy.set_xlabel("share of the time that the pool is busy")
    busy.set_xlim(0, 1)
    for axes in (waits, busy):
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize="small", frameon=False)
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
