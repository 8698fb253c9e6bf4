"""Put all parts of the report into one HTML file that needs no network.

The template escapes all text. Data for the scripts are JSON in which no character can end the element.
"""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from gkd.errors import ConfigError
from gkd.tools.report import headline, samples, settings
from gkd.tools.report.charts import chart_sections, meanings
from gkd.tools.report.decimate import Curve, extremes, means, points_per_curve
from gkd.tools.report.read import Run

_SCRIPTS = ("charts.js", "samples.js", "main.js")


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
    n_points = points_per_curve(sum(len(run.curves) for run in runs))
    losses = {settings.trained_loss(run) for run in runs}
    data = {
        "runs": [
            {
                "name": run.name,
                "curves": {key: _columns(key, extremes(curve, n_points)) for key, curve in run.curves.items()},
                "means": {key: _columns(key, means(run.curves[key], n_points)) for key in stacked & run.curves.keys()},
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
        differences=settings.differences(runs) if len(runs) > 1 else [],
        losses_differ=len(losses) > 1,
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
        "settings": settings.from_defaults(run),
        "has_settings": bool(run.settings),
        "alarms": headline.alarms(run),
        "has_health": any(key.startswith(headline.PREFIX) for key in run.curves),
        "gpus": gpus,
        "environment": [_flat(start) for start in run.environment()],
    }


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Return dotted key and text of each value of a JSON object."""
    if isinstance(tree, dict) and tree:
        return [row for key, value in tree.items() for row in _flat(value, f"{prefix}.{key}" if prefix else str(key))]
    return [(prefix, tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False))]
