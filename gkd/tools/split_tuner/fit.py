"""Fit rates to measured times; report what had to be assumed if the measurements do not determine them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

_SURE = 0.2  # maximum relative standard error of an accepted slope
_ROUNDING = 1e-12  # of a sum of squares
_SPREAD = 0.02  # of the sequences per pass, relative to the mean: below this the slope is undetermined


@dataclass(frozen=True, slots=True)
class Line:
    """y = fixed n + slope x, both 0 or more."""

    fixed: float
    slope: float
    is_assumed: bool  # x varied too little: assumes that y is proportional to x


def line(x: np.ndarray, y: np.ndarray, n: np.ndarray | None = None) -> Line:
    """Fit a line by least squares to [rows] float64 each; x must not be all 0.

    Args:
        n: number of items that each row sums over; None: one.
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
    if fixed < 0.0:  # within the accuracy of the measurement: no fixed part
        return Line(0.0, proportional.slope, False)
    return Line(fixed, slope, False)


def non_negative(products: np.ndarray, with_y: np.ndarray) -> np.ndarray:
    """Return the c >= 0 that minimizes sum (c x - y)^2.

    Args:
        products: [k, k], the sum of x x^T; k is small, so all sets of nonzero entries are tried.
        with_y: [k], the sum of x y.
    """
    k = len(with_y)
    scale = np.sqrt(np.maximum(np.diag(products), 1e-300))  # so that seconds per pass and per token have equal weight
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
    """Return (pass_s, sequence_s, prefill_s), and whether sequence_s is undetermined and assumed to be 0.

    It is undetermined if all passes had about the same number of sequences.

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
