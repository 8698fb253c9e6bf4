"""Reduce a curve to a bounded number of points that keeps every peak.

A curve with more points than the limit is cut into buckets of equal numbers of points. A bucket keeps its minimum, its
maximum and, if it has a value that is not finite, the first of these. First and last point are always kept. A stacked
chart needs the same x for all its curves: it shows the mean of each bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_POINTS = 1000  # of a curve: 500 buckets
MIN_POINTS = 100
ALL_POINTS = 250_000  # of a page; with more curves each has fewer points


@dataclass(frozen=True, slots=True)
class Curve:
    """Values of one key: step -> value; None: not finite."""

    steps: Sequence[int]
    values: Sequence[float | None]


def points_per_curve(n_curves: int) -> int:
    """Return the largest number of points of a curve on a page with `n_curves` curves."""
    return min(max(ALL_POINTS // max(n_curves, 1), MIN_POINTS), MAX_POINTS)


def extremes(curve: Curve, max_points: int = MAX_POINTS) -> Curve:
    """Return the curve with at most about `max_points` points, see above. A shorter curve is returned as it is."""
    n = len(curve.steps)
    if n <= max_points:
        return curve
    buckets = _buckets(curve, max(max_points // 2, 1))
    base = np.arange(len(buckets)) * buckets.shape[1]
    lowest = np.where(np.isnan(buckets), np.inf, buckets).argmin(axis=1)
    highest = np.where(np.isnan(buckets), -np.inf, buckets).argmax(axis=1)
    lost = np.flatnonzero(np.isnan(np.array([np.nan if v is None else v for v in curve.values])))
    _, first = np.unique(lost // buckets.shape[1], return_index=True)
    kept = np.unique(np.concatenate([[0, n - 1], base + lowest, base + highest, lost[first]]))
    kept = kept[kept < n]
    return Curve([curve.steps[i] for i in kept], [curve.values[i] for i in kept])


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
