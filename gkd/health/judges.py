"""Decide from the history whether each check holds: functions of a `History` and a limit.

A judge returns None if the newest line, or the run so far, does not have the numbers it needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np

N_FIRST, N_RECENT = 5, 100  # values kept of each metric

KL = ("loss/token_kl", "loss/sampled_reverse_kl")  # the gap to the teacher; the second without a distribution
EVAL_KL = ("eval/kl", "eval/reverse_kl")
# loss/engine_kl, see `by_staleness`
FRESH_KL, STALE_KL = "loss/engine_kl at staleness 0", "loss/engine_kl of stale rollouts"
# Not limits of a check but parts of its definition; docs/health.md has the reasons.
FAR_KL = 4.0  # nats: teacher_mismatch without a distribution
SAME_KL_SHARE = 0.8  # entropy_collapse: the KL is at least this share of its first value
MIN_ENTROPY = 0.01  # nats: entropy_collapse needs an entropy that can fall
N_SPIKES, SPIKE_STEPS = 2, 10  # gradient_spikes
KL_MARGIN = 0.05  # nats: kl_rises, stale_rollouts
EVAL_MARGIN = 0.01  # nats: worse_than_start
ACCURACY_LOSS = 0.1  # worse_than_start
MIN_WRONG = 0.02  # sure_and_wrong: share of the tokens from which a rise counts
KL_FELL = 0.9  # accuracy_falls: the KL is at most this share of its first value


class History:
    """The lines of metrics.jsonl so far, in bounded memory. Missing values and null are skipped."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._newest: Mapping[str, float | None] = {}
        self.begins_at: float | None = None  # step of the first line

    def add(self, line: Mapping[str, float | None]) -> None:
        """Add the numbers of one line."""
        self._newest = line
        if self.begins_at is None:
            self.begins_at = line["step"]
        for name, value in line.items():
            if value is None or not np.isfinite(value):
                continue
            first = self._first.setdefault(name, [])
            if len(first) < N_FIRST:
                first.append(value)
            self._recent.setdefault(name, deque(maxlen=N_RECENT)).append(value)

    def is_new(self, name: str) -> bool:
        """Return whether the newest line has a finite value of the metric."""
        value = self._newest.get(name)
        return value is not None and bool(np.isfinite(value))

    def any_new(self, *names: str) -> str | None:
        """Return the first of the metrics of which the newest line has a value."""
        return next((name for name in names if self.is_new(name)), None)

    def last(self, name: str, n: int) -> list[float] | None:
        """Return the last `n` values, at most `N_RECENT`; None: there are fewer, or the newest line has none."""
        values = self._recent.get(name, ())
        if not self.is_new(name) or len(values) < n:
            return None
        return list(islice(values, len(values) - n, None))

    def mean(self, name: str, n: int) -> float | None:
        """Return the mean of the last `n` values; None as for `last`."""
        values = self.last(name, n)
        return None if values is None else float(np.mean(values))

    def first(self, name: str, n: int = 1) -> list[float] | None:
        """Return the first `n` values, at most `N_FIRST`; None: there are fewer."""
        values = self._first.get(name, [])
        return values[:n] if len(values) >= n else None

    def means(self, name: str, n: int) -> np.ndarray:
        """Return the means of all runs of `n` values among the last `N_RECENT`, oldest first."""
        values = np.array(self._recent.get(name, ()), float)
        return np.lib.stride_tricks.sliding_window_view(values, n).mean(axis=1) if len(values) >= n else np.zeros(0)


class Verdict(NamedTuple):
    is_sick: bool
    evidence: str
    remark: str = ""  # logged the first time


Judge = Callable[[History, float], Verdict | None]


def above(key: str, n: int) -> Judge:
    """Return the judge of: the mean of the last `n` values is above the limit."""
    return lambda history, limit: _compared(history, key, n, limit, sign=1)


def below(key: str, n: int) -> Judge:
    """Return the judge of: the mean of the last `n` values is below the limit."""
    return lambda history, limit: _compared(history, key, n, limit, sign=-1)


def _compared(history: History, key: str, n: int, limit: float, *, sign: int) -> Verdict | None:
    mean = history.mean(key, n)
    if mean is None:
        return None
    return Verdict(sign * mean > sign * limit, f"{key} {mean:.3g} (mean of {n} steps), limit {limit:g}")


def truncated(history: History, limit: float) -> Verdict | None:
    """Judge whether most responses are cut, and many more than in the first step, if most were cut there, too."""
    name = "rollout/truncated_share"
    now, first = history.mean(name, 3), history.first(name)
    if now is None or first is None:
        return None
    begins_cut = first[0] > limit
    most = (1 + first[0]) / 2 if begins_cut else limit
    remark = (
        f"answers are cut: {now:.0%} of the responses reach data.max_response_length, since the first step. Raise it "
        "if answers shall be whole; if they do not end, check rollout.stop_token_ids and data.chat_template"
    )
    evidence = f"{name} {now:.3g} (mean of 3 steps), {first[0]:.3g} in the first step, limit {most:.3g}"
    return Verdict(now > most, evidence, remark if begins_cut and now > limit else "")


def teacher_mismatch(history: History, limit: float) -> Verdict | None:
    """Judge whether student and teacher hardly agree on any token."""
    if history.is_new("loss/overlap"):
        return _compared(history, "loss/overlap", 3, limit, sign=-1)
    return _compared(history, "loss/sampled_reverse_kl", 3, FAR_KL, sign=1)


def overlap_falls(history: History, limit: float) -> Verdict | None:
    """Judge whether the overlap is below its best value of the last steps."""
    now, means = history.mean("loss/overlap", 5), history.means("loss/overlap", 5)
    if now is None:
        return None
    best = float(means.max())
    return Verdict(best - now > limit, f"loss/overlap {best:.3g} -> {now:.3g} (means of 5 steps), limit {limit:g} less")


def entropy_collapse(history: History, limit: float) -> Verdict | None:
    """Judge whether the entropy is a small share of its first value, and the KL has not fallen with it."""
    kl = history.any_new(*KL)
    entropy, gap = history.mean("loss/student_entropy", 5), history.mean(kl, 5) if kl else None
    firsts, first_gaps = history.first("loss/student_entropy", 5), history.first(kl, 5) if kl else None
    if entropy is None or gap is None or not firsts or not first_gaps or np.mean(firsts) < MIN_ENTROPY:
        return None
    first, first_gap = float(np.mean(firsts)), float(np.mean(first_gaps))
    fell = entropy < limit * first and gap > SAME_KL_SHARE * first_gap
    evidence = f"loss/student_entropy {first:.3g} -> {entropy:.3g}, {kl} {first_gap:.3g} -> {gap:.3g}"
    return Verdict(fell, f"{evidence} (means of 5 steps), limit {limit:g} of the first entropy")


def gradient_spikes(history: History, limit: float) -> Verdict | None:
    """Judge whether several of the last gradient norms are far above the median."""
    recent = history.last("optim/grad_norm", SPIKE_STEPS)
    values = history.means("optim/grad_norm", 1)
    if recent is None or len(values) < 2 * SPIKE_STEPS:
        return None
    median = float(np.median(values))
    n = sum(value > limit * median for value in recent)
    evidence = f"optim/grad_norm up to {max(recent):.3g}, median {median:.3g}: {n} of {SPIKE_STEPS} steps above "
    return Verdict(n >= N_SPIKES, f"{evidence}{limit:g} times the median")


def no_gap(history: History, limit: float) -> Verdict | None:
    """Judge whether the KL was almost 0 when the run began."""
    kl = history.any_new(*KL)
    first = history.first(kl, 5) if kl else None
    if first is None or history.begins_at is None or history.begins_at > 1:  # a branch begins later
        return None
    mean = abs(float(np.mean(first)))
    return Verdict(mean < limit, f"{kl} {mean:.2g} (mean of the first 5 steps), limit {limit:g}")


def kl_rises(history: History, limit: float) -> Verdict | None:
    """Judge whether the KL is far above its first and its lowest value."""
    kl = history.any_new(*KL)
    now, first = (history.mean(kl, 5), history.first(kl)) if kl else (None, None)
    if kl is None or now is None or first is None:
        return None
    best = min(first[0], *history.means(kl, 5))
    evidence = f"{kl} {best:.3g} -> {now:.3g} (mean of 5 steps), limit {limit:g} times"
    return Verdict(now > limit * max(best, 0.0) + KL_MARGIN, evidence)


def accuracy_falls(history: History, limit: float) -> Verdict | None:
    """Judge whether the accuracy has fallen although the KL has fallen."""
    found = _evaluations(history)
    if found is None or found.accuracy is None:
        return None
    fell = found.first_accuracy - found.accuracy > limit
    return Verdict(fell and found.kl < KL_FELL * found.first_kl, f"{found.evidence}, limit {limit:g} less")


def worse_than_start(history: History, limit: float) -> Verdict | None:
    """Judge whether the KL has risen since the first evaluation, or the accuracy has fallen with no gain in KL."""
    found = _evaluations(history)
    if found is None:
        return None
    is_worse = found.kl > limit * max(found.first_kl, 0.0) + EVAL_MARGIN
    if found.accuracy is not None and found.kl >= KL_FELL * found.first_kl:
        is_worse = is_worse or found.first_accuracy - found.accuracy > ACCURACY_LOSS
    return Verdict(is_worse, f"{found.evidence}, limit {limit:g} times the first KL")


def ends_disagree(history: History, limit: float) -> Verdict | None:
    """Judge whether much of the KL is at the tokens that end responses, and there is a KL worth the question."""
    share, kl = history.mean("eval/end_kl_share", 1), history.mean("eval/kl", 1)
    if share is None or kl is None:
        return None
    return Verdict(share > limit and kl > KL_MARGIN, f"eval/end_kl_share {share:.3g} of {kl:.3g} nats, limit {limit:g}")


def sure_and_wrong(history: History, limit: float) -> Verdict | None:
    """Judge whether the student has become sure of tokens that the teacher denies."""
    name = "eval/sure_and_wrong_share"
    now, first = history.last(name, 2), history.first(name)
    if now is None or first is None:
        return None
    most = limit * max(first[0], MIN_WRONG)
    return Verdict(now[-1] > most, f"{name} {first[0]:.3g} -> {now[-1]:.3g}, limit {most:.3g}")


def stale_rollouts(history: History, limit: float) -> Verdict | None:
    """Judge whether stale rollouts are as far from the student as the student is from the teacher."""
    kl = history.any_new(*KL)
    moved, gap = history.mean(STALE_KL, 3), history.mean(kl, 3) if kl else None
    if moved is None or gap is None:
        return None
    evidence = f"{STALE_KL} {moved:.3g}, {kl} {gap:.3g} (means of 3 steps), limit {limit:g} times"
    return Verdict(moved > max(limit * abs(gap), KL_MARGIN), evidence)


def by_staleness(line: dict[str, float | None]) -> dict[str, float | None]:
    """Return the line with loss/engine_kl also under a name that depends on the staleness."""
    age, kl = line.get("staleness/max"), line.get("loss/engine_kl")
    return line if age is None else line | {FRESH_KL if age == 0 else STALE_KL: kl}


class _Evaluations(NamedTuple):
    """The first evaluation and the newest."""

    first_kl: float
    kl: float
    first_accuracy: float
    accuracy: float | None
    evidence: str


def _evaluations(history: History) -> _Evaluations | None:
    kl = history.any_new(*EVAL_KL)
    now, first = (history.last(kl, 2), history.first(kl)) if kl else (None, None)
    if now is None or first is None:
        return None
    accuracy, first_accuracy = history.last("eval/accuracy", 2), history.first("eval/accuracy")
    evidence = f"{kl} {first[0]:.3g} -> {now[-1]:.3g}"
    if accuracy is None or first_accuracy is None:
        return _Evaluations(first[0], now[-1], 0.0, None, evidence)
    evidence += f", eval/accuracy {first_accuracy[0]:.3g} -> {accuracy[-1]:.3g}"
    return _Evaluations(first[0], now[-1], first_accuracy[0], accuracy[-1], evidence)
