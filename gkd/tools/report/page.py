"""Put all parts of the report into one HTML file that needs no network.

The template escapes all text. Data for the scripts are JSON in which no character can end the element.
"""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from gkd.config.schema_sections import all_keys
from gkd.errors import ConfigError
from gkd.metrics.catalog import ROWS, Row
from gkd.tools.report import groups, headline, samples
from gkd.tools.report.read import Curve, Run

_SCRIPTS = ("charts.js", "samples.js", "main.js")
MAX_POINTS = 1000  # points of a curve: 500 buckets
MIN_POINTS = 100
ALL_POINTS = 250_000  # points of a page; with more curves each has fewer points


def page(runs: Sequence[Run], reload_s: float = 0) -> str:
    """Return the page of one or several runs.

    Args:
        reload_s: seconds after which the page loads itself again; 0: it does not.

    Raises:
        ConfigError: the libraries of the page are not installed.
        CheckpointError, ClusterError: a file of a run is damaged.
    """
    render, plotly = _libraries()
    keys = list(dict.fromkeys(key for run in runs for key in run.curves))
    sections = chart_sections(keys)
    stacked = {key for s in sections for chart in s["charts"] if chart["stacked"] for key in chart["keys"]}
    n_curves = sum(len(run.curves) for run in runs)
    n_points = min(max(ALL_POINTS // max(n_curves, 1), MIN_POINTS), MAX_POINTS)  # at most, of a curve
    losses = {trained_loss(run) for run in runs}
    data = {
        "runs": [
            {
                "name": run.name,
                "curves": {key: _columns(key, extremes(curve, n_points)) for key, curve in run.curves.items()},
                "means": {
                    key: _columns(key, means(_on_one_x(run, key, n_points), n_points))
                    for key in stacked & run.curves.keys()
                },
                "samples": samples.browser(run, len(runs)),
            }
            for run in runs
        ],
        "sections": sections,
        "meanings": meanings(keys),
        "losses_differ": len(losses) > 1,
        "reload_s": reload_s,
    }
    return render(
        title=", ".join(run.name for run in runs),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        runs=[_tables(run) for run in runs],
        headline=headline.headline(runs),
        differences=differences(runs) if len(runs) > 1 else [],
        losses_differ=len(losses) > 1,
        kl_differs=len({_values(run, _KL) for run in runs}) > 1,
        sections=sections,
        n_points=n_points,
        rules=samples,
        style=_asset("style.css"),
        script="\n".join(_asset(name) for name in _SCRIPTS),
        plotly=plotly,
        data=json_in_html(data),
        reload_s=reload_s,
    )


def json_in_html(data: Any) -> str:
    """Return JSON for a script element: a response may contain `</script>` or `<!--`."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _libraries() -> tuple[Any, str]:
    """Return the template's render function and the source of the plotting library."""
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        fix = 'install the extra: .venv/bin/python -m pip install -e ".[report]".'
        raise ConfigError("python package", error.name or "", "the report needs it.", fix) from error
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.undefined = jinja2.StrictUndefined
    environment.filters["marked"] = lambda text: jinja2.utils.markupsafe.Markup(_marked(text))
    return environment.from_string(_asset("page.html")).render, get_plotlyjs()


def _marked(text: str) -> str:
    """Return the catalog's Markdown as HTML: code, and links as their text, because the pages are not in this file."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", html.escape(text))
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", plain)


def _asset(name: str) -> str:
    return (files("gkd.tools.report") / "assets" / name).read_text(encoding="utf-8")


def _columns(key: str, curve: Curve) -> list[list[Any]]:
    """Return steps and values with as many digits as a person reads; a time of day needs more."""
    digits = 13 if key == "time/unix_s" else 6
    return [list(curve.steps), [None if value is None else float(f"{value:.{digits}g}") for value in curve.values]]


def _tables(run: Run) -> dict[str, Any]:
    """Return the tables of one run."""
    gpus = run.gpu_map()
    return {
        "name": run.name,
        "root": str(run.root),
        "n_lines": len(run.lines),
        "settings": from_defaults(run),
        "has_settings": bool(run.settings),
        "alarms": headline.alarms(run),
        "has_health": any(key.startswith(headline.PREFIX) for key in run.curves),
        "gpus": gpus,
        "where": _where(run),
        "environment": [_flat(start) for start in run.environment()],
    }


def _where(run: Run) -> dict[str, Any] | None:
    """Return the table of `gkd where` with the lines above it; None: the run has kept no tokens."""
    if not run.step_files("token_losses"):
        return None
    evaluated = groups.evaluations(run)
    return {"lines": [groups.sentence(evaluated), *evaluated[-1].missing], "rows": groups.rows([evaluated])}


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Return dotted key and text of each value of a JSON object."""
    if isinstance(tree, dict) and tree:
        return [row for key, value in tree.items() for row in _flat(value, f"{prefix}.{key}" if prefix else str(key))]
    return [(prefix, tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False))]


def extremes(curve: Curve, max_points: int = MAX_POINTS) -> Curve:
    """Return the curve with at most about `max_points` points. A shorter curve is returned as it is.

    It keeps every peak: a longer curve is cut into buckets of equal size. A bucket keeps its minimum, its maximum
    and, if it has a value that is not finite, the first of these. First and last point are always kept. A stacked
    chart needs the same x for all its curves: it shows the mean of each bucket.
    """
    n = len(curve.steps)
    if n <= max_points:
        return curve
    buckets = _buckets(curve, max(max_points // 2, 1))
    base = np.arange(len(buckets)) * buckets.shape[1]
    is_lost = np.isnan(buckets)
    lowest = base + np.where(is_lost, np.inf, buckets).argmin(axis=1)
    highest = base + np.where(is_lost, -np.inf, buckets).argmax(axis=1)
    lost = (base + is_lost.argmax(axis=1))[is_lost.any(axis=1)]
    kept = np.unique(np.concatenate([[0, n - 1], lowest, highest, lost]))
    kept = kept[kept < n]
    return Curve([curve.steps[i] for i in kept], [curve.values[i] for i in kept])


def _on_one_x(run: Run, key: str, max_points: int) -> Curve:
    """Return the curve of a stacked chart. If it has buckets, lines without the key, like time/eval_s, count as 0.

    The buckets of all curves of the chart have the same steps then.
    """
    if len(run.lines) <= max_points:
        return run.curves[key]
    return Curve([int(line["step"] or 0) for line in run.lines], [line.get(key, 0.0) for line in run.lines])


def means(curve: Curve, max_points: int = MAX_POINTS) -> Curve:
    """Return the mean of each of at most `max_points` buckets, at the bucket's first step."""
    if len(curve.steps) <= max_points:
        return curve
    buckets = _buckets(curve, max_points)
    counts = (~np.isnan(buckets)).sum(axis=1)
    sums = np.nansum(buckets, axis=1)
    values = [None if n == 0 else float(total / n) for n, total in zip(counts, sums, strict=True)]
    return Curve(list(curve.steps[:: buckets.shape[1]]), values)


def _buckets(curve: Curve, n_buckets: int) -> np.ndarray:
    """Return [n_buckets or fewer, size] float64; missing values and the end of the last bucket are NaN."""
    size = -(-len(curve.values) // n_buckets)
    padded = np.full(-(-len(curve.values) // size) * size, np.nan)
    padded[: len(curve.values)] = [np.nan if value is None else value for value in curve.values]
    return padded.reshape(-1, size)


# List the charts of the page: which keys of metrics.jsonl each one shows, and what they mean.


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
        "unit": rows[0].unit if rows[0].unit != "1" else "",
        "stacked": chart.stacked,
        "rows": [{"key": row.key, **_meaning(row)} for row in rows],
    }


def _meaning(row: Row) -> dict[str, str]:
    return {"unit": row.unit, "meaning": row.meaning, "healthy": row.healthy, "problem": row.problem}


# Find the settings of a run that differ from the defaults, and those that differ between runs.

# Differ between any two runs, so they explain nothing.
_PLACES = frozenset({"trainer.run_dir", "teacher.server_port", "teacher.url"})


def from_defaults(run: Run) -> list[dict[str, str]]:
    """Return key, value, default and help of each setting that is not the default; unknown keys have no help."""
    rows = []
    for name, value in run.settings.items():
        declared = all_keys().get(name)
        if declared is None:
            rows.append({"key": name, "value": shown(value), "default": "", "help": ""})
        elif _plain(value) != _plain(declared.default):
            row = {"key": name, "value": shown(value), "default": shown(declared.default)}
            rows.append(row | {"help": declared.help})
    return rows


def differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return key, help and the runs' values of each setting that differs between runs; folders and ports come last."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    rows = []
    for name in sorted(names, key=lambda name: name in _PLACES):
        values = [shown(run.settings[name]) if name in run.settings else "(no such key)" for run in runs]
        if len(set(values)) > 1:
            key = all_keys().get(name)
            rows.append({"key": name, "values": values, "help": key.help if key else ""})
    return rows


# What makes values of eval/kl incomparable.
_KL = (
    *("teacher.signal", "teacher.topk", "teacher.mass", "teacher.temperature", "teacher.tokenizer"),
    *("distill.tail", "distill.support", "distill.units"),
)


def trained_loss(run: Run) -> str:
    """Return what makes values of loss/total incomparable."""
    return _values(run, [name for name in all_keys() if name.startswith("distill.") or name in _KL])


def _values(run: Run, names: Iterable[str]) -> str:
    return json.dumps([_plain(run.settings.get(name, all_keys()[name].default)) for name in names])


def shown(value: Any) -> str:
    """Return a value as it is written in YAML's flow style."""
    if isinstance(value, str):
        return value or '""'
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return a value in which equal numbers are equal: YAML may have 1 for 1.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value
