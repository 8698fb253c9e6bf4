"""Compare the keys of a run's metrics with the rows of docs/metrics.md."""

from __future__ import annotations

from pathlib import Path

from gkd.metrics.catalog import ROWS
from gkd.metrics.writer import read_metrics


def unlisted_keys(run_dir: Path) -> set[str]:
    """Return the keys in metrics.jsonl for which there is no row."""
    keys = {key for line in read_metrics(run_dir / "metrics.jsonl") for key in line} - {"step"}
    return {key for key in keys if not any(row.matches(key) for row in ROWS)}
