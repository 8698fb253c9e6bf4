"""List the charts of the page: which keys of metrics.jsonl each one shows, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gkd.metrics.catalog import Row
from gkd.metrics.catalog_learning import LEARNING
from gkd.metrics.catalog_system import SYSTEM

ROWS: tuple[Row, ...] = tuple(row for rows in (LEARNING | SYSTEM).values() for row in rows)


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves of one picture.

    Args:
        rows: keys of catalog rows; all keys of metrics.jsonl that belong to one of them are shown.
        stacked: areas on top of each other, one picture per run. Otherwise lines, all runs in one picture.
    """

    title: str
    rows: tuple[str, ...]
    stacked: bool = False


# Heading -> charts, in the order of the page.
CHARTS: dict[str, tuple[Chart, ...]] = {
    "Learning": (
        Chart("KL(teacher || student) on validation prompts", ("eval/kl",)),
        Chart("Estimated KL(student || teacher) on validation prompts", ("eval/reverse_kl",)),
        Chart("Accuracy on validation prompts", ("eval/accuracy", "domain/<route>/accuracy")),
        Chart("Trained loss", ("loss/total",)),
        Chart("KL(teacher || student) on training rollouts", ("loss/token_kl", "domain/<route>/token_kl")),
        Chart("Share of each route in the loss", ("domain/<route>/loss_share",)),
        Chart("Terms of the loss", ("loss/<loss>", "loss/reference_kl", "loss/sampled_reverse_kl")),
        Chart("Gradient norm", ("optim/grad_norm",)),
        Chart("Learning rate", ("optim/lr",)),
        Chart("Entropy of the student", ("loss/student_entropy",)),
    ),
    "Responses": (
        Chart("Mean response length", ("rollout/response_length_mean",)),
        Chart("Truncated responses", ("rollout/truncated_share",)),
        Chart("Repeated 4-grams", ("rollout/repeated_4gram_share",)),
        Chart("The teacher's probability of the student's end tokens", ("loss/teacher_end_probability",)),
    ),
    "Teacher signal and staleness": (
        Chart("Mass of the top-k list", ("teacher/topk_mass", "loss/teacher_topk_mass", "loss/student_topk_mass")),
        Chart("Overlap of teacher and student", ("loss/overlap",)),
        Chart("Importance weights", ("loss/importance_weight", "loss/importance_clipped")),
        Chart("Engine against actor", ("loss/engine_kl",)),
        Chart("Staleness", ("staleness/mean", "staleness/max")),
        Chart("Rollouts by age", ("staleness/share_<age>",), stacked=True),
    ),
    "Time": (
        Chart("Time per stage", ("time/<stage>_s",), stacked=True),
        Chart("Waited for each pool", ("perf/waited_<pool>_share",), stacked=True),
        Chart("Duration of a step", ("time/step_s",)),
        Chart("Response tokens per second", ("perf/response_tokens_per_s",)),
        Chart("Busy share of the rollout engines", ("perf/rollout_busy_share",)),
    ),
    "Memory": (
        Chart("Peak GPU memory of the actor by phase", ("memory/<phase>/peak_gib",)),
        Chart("Host memory of the actor by phase", ("memory/<phase>/host_rss_gib",)),
        Chart(
            "Memory of the rollout engines",
            (
                *("memory/<engine_phase>/rollout_params_gib", "memory/<engine_phase>/rollout_kv_cache_gib"),
                *("memory/<engine_phase>/rollout_host_rss_gib", "memory/<engine_phase>/rollout_device_used_gib"),
            ),
        ),
        Chart("Moved states", ("memory/moved_to_host", "memory/moved_to_device")),
        Chart("Allocator", ("memory/alloc_retries", "memory/device_allocs", "memory/device_frees")),
    ),
}


def row_of(key: str) -> Row | None:
    """Return the catalog's row of a key; None: a key of an older or a newer version."""
    return next((row for row in ROWS if row.key == key), None) or next((row for row in ROWS if row.matches(key)), None)


def chart_sections(keys: Iterable[str]) -> list[dict[str, Any]]:
    """Return the sections of the page with their charts; a chart without a curve is left out.

    Args:
        keys: of the metrics of all runs.
    """
    rows = {key: row_of(key) for key in keys}
    by_row: dict[str, list[str]] = {}
    for key, row in rows.items():
        if row is not None:
            by_row.setdefault(row.key, []).append(key)
    sections = []
    for heading, charts in CHARTS.items():
        shown = [_chart(chart, by_row) for chart in charts if any(name in by_row for name in chart.rows)]
        if shown:
            sections.append({"heading": heading, "charts": shown})
    return sections


def meanings(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return unit, meaning, healthy values and problem of each key that the catalog has."""
    return {key: _meaning(row) for key in keys if (row := row_of(key)) is not None}


def _chart(chart: Chart, by_row: dict[str, list[str]]) -> dict[str, Any]:
    keys = [key for name in chart.rows for key in by_row.get(name, ())]
    rows = [row for row in ROWS if row.key in chart.rows and row.key in by_row]
    return {
        "id": "chart-" + "".join(c if c.isalnum() else "-" for c in chart.rows[0]),
        "title": chart.title,
        "keys": keys,
        "unit": rows[0].unit,
        "stacked": chart.stacked,
        "rows": [{"key": row.key, **_meaning(row)} for row in rows],
    }


def _meaning(row: Row) -> dict[str, str]:
    return {"unit": row.unit, "meaning": row.meaning, "healthy": row.healthy, "problem": row.problem}
