"""Measured times to rates, and what had to be assumed where the measurements cannot tell."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

_SURE = 0.2  # relative standard error up to which a slope is believed
_ROUNDING = 1e-12  # of a sum of squares
_SPREAD = 0.02  # of the sequences in a pass: with less than this share of the mean, there is no slope to be seen


@dataclass(frozen=True, slots=True)
class Line:
    """y = fixed n + slope x, both 0 or more."""

    fixed: float
    slope: float
    is_assumed: bool  # x varied too little: y is taken as proportional to x


def line(x: np.ndarray, y: np.ndarray, n: np.ndarray | None = None) -> Line:
    """Least squares; [rows] float64 each, x not all 0.

    Args:
        n: of how many things each row is the sum; None: of one.
    """
    n = np.ones(len(x)) if n is None else n
    proportional = Line(0.0, float(y.sum() / x.sum()), True)
    centred = x - n * (n @ x / (n @ n))
    spread = float(centred @ centred)
    if len(x) < 4 or spread <= _ROUNDING * float(x @ x):
        return proportional
    slope = float(centred @ y) / spread
    fixed = float(n @ (y - slope * x) / (n @ n))
    rest = y - fixed * n - slope * x
    error = float(np.sqrt(rest @ rest / (len(x) - 2) / spread))
    if slope <= 0.0 or error > _SURE * slope:
        return proportional
    if fixed < 0.0:  # as exact as the measurement: no fixed part
        return Line(0.0, proportional.slope, False)
    return Line(fixed, slope, False)


def non_negative(products: np.ndarray, with_y: np.ndarray) -> np.ndarray:
    """The c >= 0 for which sum (c x - y)^2 is smallest.

    Args:
        products: [k, k], the sum of x x^T; k is small: all sets of entries that are not 0 are tried.
        with_y: [k], the sum of x y.
    """
    k = len(with_y)
    scale = np.sqrt(np.maximum(np.diag(products), 1e-300))  # so that seconds a pass and a token weigh alike
    scaled, right = products / np.outer(scale, scale), with_y / scale
    best, best_cost = np.zeros(k), 0.0
    for size in range(1, k + 1):
        for chosen in combinations(range(k), size):
            some = list(chosen)
            c = np.linalg.lstsq(scaled[np.ix_(some, some)], right[some], rcond=1e-10)[0]
            cost = float(c @ scaled[np.ix_(some, some)] @ c - 2 * c @ right[some])
            if (c >= 0).all() and cost < best_cost:
                best, best_cost = np.zeros(k), cost
                best[some] = c
    return best / scale


def passes(products: np.ndarray) -> tuple[np.ndarray, bool]:
    """(pass_s, sequence_s, prefill_s), and whether passes had too equal numbers of sequences to tell the first two
    apart: then all of a pass's time is taken as fixed.

    Args:
        products: [4, 4], the sum over passes of x x^T with x = (1, b, p, seconds), see `gkd.rollout.usage`.
    """
    n, total, squares = products[0, 0], products[0, 1], products[1, 1]
    variance = max(0.0, squares / n - (total / n) ** 2)
    if np.sqrt(variance) > _SPREAD * total / n:
        return non_negative(products[:3, :3], products[:3, 3]), False
    some = [0, 2]
    fixed, prefill = non_negative(products[np.ix_(some, some)], products[some, 3])
    return np.array([fixed, 0.0, prefill]), True
