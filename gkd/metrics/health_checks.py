"""The health checks: functions of a `History` and a limit.

docs/health.md, to which `health.md` in this folder is a link, has a row for each: the condition in words, why the
threshold is where it is, likely cause and keys to change. A judge raises NoNumbers if the newest line, or the run so
far, does not have the numbers it needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from gkd.metrics.catalog import table_rows

# Values kept of each metric.
N_FIRST = 5
N_RECENT = 100
N = 3  # steps whose mean most checks compare

KL = ("loss/token_kl", "loss/sampled_reverse_kl")  # the gap to the teacher; the second without a distribution
# loss/engine_kl, see `History.add`
FRESH_KL = "loss/engine_kl at staleness 0"
STALE_KL = "loss/engine_kl of stale rollouts"
# These are not limits of a check but parts of its definition; docs/health.md has the reasons.
FAR_KL = 4.0  # nats: teacher_mismatch without a distribution
KL_MARGIN = 0.05  # nats: kl_rises, stale_rollouts, ends_disagree


class NoNumbers(LookupError):
    """Tells that the newest line has no value of a metric, or the run too few."""


class History:
    """The lines of metrics.jsonl so far, in bounded memory. Values that are missing or not finite are skipped.

    Attributes:
        begins_at: step of the first line.
    """

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._newest: set[str] = set()  # metrics of the newest line
        self.begins_at: float | None = None

    def add(self, line: Mapping[str, float | None]) -> None:
        """Add the numbers of one line, loss/engine_kl also under a name that depends on the staleness."""
        if (age := line.get("staleness/max")) is not None:
            line = {**line, FRESH_KL if age == 0 else STALE_KL: line.get("loss/engine_kl")}
        if self.begins_at is None:
            self.begins_at = line["step"]
        self._newest = set()
        for name, value in line.items():
            if value is not None and np.isfinite(value):
                self._newest.add(name)
                self._recent.setdefault(name, deque(maxlen=N_RECENT)).append(value)
                first = self._first.setdefault(name, [])
                if len(first) < N_FIRST:
                    first.append(value)

    def any_new(self, *names: str) -> str:
        """Return the first of the metrics of which the newest line has a value. Raises NoNumbers."""
        for name in names:
            if name in self._newest:
                return name
        raise NoNumbers(*names)

    def means(self, name: str, n: int) -> np.ndarray:
        """Return the means of all runs of `n` values among the last `N_RECENT`, newest last. Raises NoNumbers."""
        values = self._recent[self.any_new(name)]
        if len(values) < n:
            raise NoNumbers(name)
        return np.lib.stride_tricks.sliding_window_view(np.array(values), n).mean(axis=1)

    def mean(self, name: str, n: int) -> float:
        """Return the mean of the last `n` values. Raises NoNumbers."""
        return float(self.means(name, n)[-1])

    def first(self, name: str, n: int = 1) -> float:
        """Return the mean of the first `n` values, at most `N_FIRST`. Raises NoNumbers."""
        values = self._first.get(name, [])
        if len(values) < n:
            raise NoNumbers(name)
        return float(np.mean(values[:n]))


class Verdict(NamedTuple):
    is_sick: bool
    evidence: str
    remark: str = ""  # logged the first time


Judge = Callable[[History, float], Verdict]


def _compared(history: History, limit: float, key: str, sign: int) -> Verdict:
    """Judge whether the mean of the last steps is above the limit; with sign -1 whether it is below."""
    mean = history.mean(key, N)
    return Verdict(sign * mean > sign * limit, f"{key} {mean:.3g} (mean of {N} steps), limit {limit:g}")


def truncated(history: History, limit: float) -> Verdict:
    """Judge whether most responses are cut, and many more than in the first step, if most were cut there, too."""
    name = "rollout/truncated_share"
    now = history.mean(name, N)
    first = history.first(name)
    begins_cut = first > limit
    most = (1 + first) / 2 if begins_cut else limit
    remark = (
        f"answers are cut: {now:.0%} of the responses reach data.max_response_length, since the first step. Raise it "
        "if answers shall be whole; if they do not end, check rollout.stop_token_ids and data.chat_template"
    )
    evidence = f"{name} {now:.3g} (mean of {N} steps), {first:.3g} in the first step, limit {most:.3g}"
    return Verdict(now > most, evidence, remark if begins_cut and now > limit else "")


def teacher_mismatch(history: History, limit: float) -> Verdict:
    """Judge whether student and teacher hardly agree on any token."""
    if history.any_new("loss/overlap", KL[1]) == KL[1]:
        return _compared(history, FAR_KL, KL[1], 1)
    return _compared(history, limit, "loss/overlap", -1)


def overlap_falls(history: History, limit: float) -> Verdict:
    """Judge whether the overlap is below its best value of the last steps."""
    now = history.mean("loss/overlap", 5)
    best = float(history.means("loss/overlap", 5).max())
    return Verdict(best - now > limit, f"loss/overlap {best:.3g} -> {now:.3g} (means of 5 steps), limit {limit:g} less")


def no_gap(history: History, limit: float) -> Verdict:
    """Judge whether the KL was almost 0 when the run began."""
    kl = history.any_new(*KL)
    # The optimizer moves even a student that equals its teacher. An estimate from samples may be 0 by chance.
    n = 1 if kl == KL[0] else 5
    mean = abs(history.first(kl, n))
    if history.begins_at is None or history.begins_at > 1:  # a branch begins later
        raise NoNumbers(kl)
    return Verdict(mean < limit, f"{kl} {mean:.2g} (mean of the run's steps up to step {n}), limit {limit:g}")


def kl_rises(history: History, limit: float) -> Verdict:
    """Judge whether the KL is far above its first and its lowest value."""
    kl = history.any_new(*KL)
    now = history.mean(kl, 5)
    best = min(history.first(kl), *history.means(kl, 5))
    evidence = f"{kl} {best:.3g} -> {now:.3g} (mean of 5 steps), limit {limit:g} times"
    return Verdict(now > limit * max(best, 0.0) + KL_MARGIN, evidence)


def ends_disagree(history: History, limit: float) -> Verdict:
    """Judge whether much of the KL is at the tokens that end responses, and there is a KL worth the question."""
    share = history.mean("eval/end_kl_share", 1)
    kl = history.mean("eval/kl", 1)
    return Verdict(share > limit and kl > KL_MARGIN, f"eval/end_kl_share {share:.3g} of {kl:.3g} nats, limit {limit:g}")


def engine_logprobs(history: History, limit: float) -> Verdict:
    """Judge whether the engines compute another model than the student: in the first step, or in the last ones."""
    values = history.means(FRESH_KL, 1)
    if len(values) == 1 and history.begins_at == 1:  # the weights are still those of the folder
        text = f"{FRESH_KL} {values[0]:.3g} before the first update, limit {limit:g}"
        return Verdict(bool(values[0] > limit), text)
    return _compared(history, limit, FRESH_KL, 1)


def stale_rollouts(history: History, limit: float) -> Verdict:
    """Judge whether stale rollouts are as far from the student as the student is from the teacher."""
    kl = history.any_new(*KL)
    moved = history.mean(STALE_KL, N)
    gap = history.mean(kl, N)
    evidence = f"{STALE_KL} {moved:.3g}, {kl} {gap:.3g} (means of {N} steps), limit {limit:g} times"
    return Verdict(moved > max(limit * abs(gap), KL_MARGIN), evidence)


# Name, of `gkd.config.schema_sections.HEALTH_CHECKS` -> threshold, which health.limits replaces, and function.
_JUDGES: dict[str, tuple[float, Judge]] = {
    "truncated": (0.5, truncated),
    "repetition": (0.4, partial(_compared, key="rollout/repeated_4gram_share", sign=1)),
    "end_of_sequence": (0.1, partial(_compared, key="loss/teacher_end_probability", sign=-1)),
    "teacher_mismatch": (0.3, teacher_mismatch),
    "overlap_falls": (0.1, overlap_falls),
    "no_gap": (0.005, no_gap),
    "kl_rises": (1.5, kl_rises),
    "engine_logprobs": (0.02, engine_logprobs),
    "stale_rollouts": (0.9, stale_rollouts),
    "ends_disagree": (0.3, ends_disagree),
}
_OF_EVALUATIONS = ("ends_disagree",)  # they have few verdicts, so one without a finding clears the alarm


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        cause: likely causes, as a sentence; a cell of the page.
        change: what to change, as a sentence; a cell of the page.
        clear_after: its alarm clears after this number of verdicts without a finding in a row.
    """

    name: str
    limit: float
    judge: Judge
    cause: str
    change: str
    clear_after: int


_PAGE = (files("gkd.metrics") / "health.md").read_text(encoding="utf-8")
_CELLS = {name.strip("`"): texts for name, *texts in table_rows(_PAGE, 5)}
CHECKS = tuple(
    Check(name, limit, judge, _CELLS[name][-2], _CELLS[name][-1], clear_after=1 if name in _OF_EVALUATIONS else 10)
    for name, (limit, judge) in _JUDGES.items()
)
FLOAT32_LIMITS = {"engine_logprobs": 1e-3}  # rounding to 16 bits needs larger ones
# These compare the engine's distribution with the student's at the temperature of the loss.
NEED_EQUAL_SAMPLING = ("engine_logprobs", "stale_rollouts")
