"""The health checks: functions of a `History` and a limit, and for each the threshold, likely cause and keys to change.

docs/health.md has a row for each: also the condition in words, and why the threshold is where it is. A judge raises
NoNumbers if the newest line, or the run so far, does not have the numbers it needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

N_FIRST, N_RECENT = 5, 100  # values kept of each metric

KL = ("loss/token_kl", "loss/sampled_reverse_kl")  # the gap to the teacher; the second without a distribution
EVAL_KL = ("eval/kl", "eval/reverse_kl")
# loss/engine_kl, see `History.add`
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


class NoNumbers(LookupError):
    """Tells that the newest line has no value of a metric, or the run too few."""


class History:
    """The lines of metrics.jsonl so far, in bounded memory. Missing values and null are skipped."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._newest: Mapping[str, float | None] = {}
        self.begins_at: float | None = None  # step of the first line

    def add(self, line: Mapping[str, float | None]) -> None:
        """Add the numbers of one line, loss/engine_kl also under a name that depends on the staleness."""
        if (age := line.get("staleness/max")) is not None:
            line = {**line, FRESH_KL if age == 0 else STALE_KL: line.get("loss/engine_kl")}
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

    def any_new(self, *names: str) -> str:
        """Return the first of the metrics of which the newest line has a value. Raises NoNumbers."""
        for name in names:
            if self.is_new(name):
                return name
        raise NoNumbers(*names)

    def last(self, name: str, n: int) -> list[float]:
        """Return the last `n` values, at most `N_RECENT`. Raises NoNumbers."""
        values = self._recent.get(name, ())
        if not self.is_new(name) or len(values) < n:
            raise NoNumbers(name)
        return list(islice(values, len(values) - n, None))

    def mean(self, name: str, n: int) -> float:
        """Return the mean of the last `n` values. Raises NoNumbers."""
        return float(np.mean(self.last(name, n)))

    def first(self, name: str, n: int = 1) -> float:
        """Return the mean of the first `n` values, at most `N_FIRST`. Raises NoNumbers."""
        values = self._first.get(name, [])
        if len(values) < n:
            raise NoNumbers(name)
        return float(np.mean(values[:n]))

    def means(self, name: str, n: int) -> np.ndarray:
        """Return the means of all runs of `n` values among the last `N_RECENT`, oldest first."""
        values = np.array(self._recent.get(name, ()), float)
        return np.lib.stride_tricks.sliding_window_view(values, n).mean(axis=1) if len(values) >= n else np.zeros(0)


class Verdict(NamedTuple):
    is_sick: bool
    evidence: str
    remark: str = ""  # logged the first time


Judge = Callable[[History, float], Verdict]


def above(key: str, n: int) -> Judge:
    """Return the judge of: the mean of the last `n` values is above the limit."""
    return lambda history, limit: _compared(history, key, n, limit, sign=1)


def below(key: str, n: int) -> Judge:
    """Return the judge of: the mean of the last `n` values is below the limit."""
    return lambda history, limit: _compared(history, key, n, limit, sign=-1)


def _compared(history: History, key: str, n: int, limit: float, *, sign: int) -> Verdict:
    mean = history.mean(key, n)
    return Verdict(sign * mean > sign * limit, f"{key} {mean:.3g} (mean of {n} steps), limit {limit:g}")


def truncated(history: History, limit: float) -> Verdict:
    """Judge whether most responses are cut, and many more than in the first step, if most were cut there, too."""
    name = "rollout/truncated_share"
    now, first = history.mean(name, 3), history.first(name)
    begins_cut = first > limit
    most = (1 + first) / 2 if begins_cut else limit
    remark = (
        f"answers are cut: {now:.0%} of the responses reach data.max_response_length, since the first step. Raise it "
        "if answers shall be whole; if they do not end, check rollout.stop_token_ids and data.chat_template"
    )
    evidence = f"{name} {now:.3g} (mean of 3 steps), {first:.3g} in the first step, limit {most:.3g}"
    return Verdict(now > most, evidence, remark if begins_cut and now > limit else "")


def teacher_mismatch(history: History, limit: float) -> Verdict:
    """Judge whether student and teacher hardly agree on any token."""
    if history.is_new("loss/overlap"):
        return _compared(history, "loss/overlap", 3, limit, sign=-1)
    return _compared(history, "loss/sampled_reverse_kl", 3, FAR_KL, sign=1)


def overlap_falls(history: History, limit: float) -> Verdict:
    """Judge whether the overlap is below its best value of the last steps."""
    now, best = history.mean("loss/overlap", 5), float(history.means("loss/overlap", 5).max())
    return Verdict(best - now > limit, f"loss/overlap {best:.3g} -> {now:.3g} (means of 5 steps), limit {limit:g} less")


def entropy_collapse(history: History, limit: float) -> Verdict:
    """Judge whether the entropy is a small share of its first value, and the KL has not fallen with it."""
    name, kl = "loss/student_entropy", history.any_new(*KL)
    entropy, gap = history.mean(name, 5), history.mean(kl, 5)
    first, first_gap = history.first(name, 5), history.first(kl, 5)
    if first < MIN_ENTROPY:
        raise NoNumbers(name)
    fell = entropy < limit * first and gap > SAME_KL_SHARE * first_gap
    evidence = f"{name} {first:.3g} -> {entropy:.3g}, {kl} {first_gap:.3g} -> {gap:.3g}"
    return Verdict(fell, f"{evidence} (means of 5 steps), limit {limit:g} of the first entropy")


def gradient_spikes(history: History, limit: float) -> Verdict:
    """Judge whether several of the last gradient norms are far above the median."""
    recent = history.last("optim/grad_norm", SPIKE_STEPS)
    values = history.means("optim/grad_norm", 1)
    if len(values) < 2 * SPIKE_STEPS:
        raise NoNumbers("optim/grad_norm")
    median = float(np.median(values))
    n = sum(value > limit * median for value in recent)
    evidence = f"optim/grad_norm up to {max(recent):.3g}, median {median:.3g}: {n} of {SPIKE_STEPS} steps above "
    return Verdict(n >= N_SPIKES, f"{evidence}{limit:g} times the median")


def no_gap(history: History, limit: float) -> Verdict:
    """Judge whether the KL was almost 0 when the run began."""
    kl = history.any_new(*KL)
    # The optimizer moves even a student that equals its teacher. An estimate from samples may be 0 by chance.
    n = 1 if kl == KL[0] else 5
    mean = abs(history.first(kl, n))
    if history.begins_at is None or history.begins_at > 1:  # a branch begins later
        raise NoNumbers(kl)
    return Verdict(
        mean < limit, f"{kl} {mean:.2g} ({'first step' if n == 1 else 'mean of the first 5 steps'}), limit {limit:g}"
    )


def kl_rises(history: History, limit: float) -> Verdict:
    """Judge whether the KL is far above its first and its lowest value."""
    kl = history.any_new(*KL)
    now, best = history.mean(kl, 5), min(history.first(kl), *history.means(kl, 5))
    evidence = f"{kl} {best:.3g} -> {now:.3g} (mean of 5 steps), limit {limit:g} times"
    return Verdict(now > limit * max(best, 0.0) + KL_MARGIN, evidence)


def accuracy_falls(history: History, limit: float) -> Verdict:
    """Judge whether the accuracy has fallen although the KL has fallen."""
    found = _evaluations(history)
    if found.accuracy is None:
        raise NoNumbers("eval/accuracy")
    fell = found.first_accuracy - found.accuracy > limit
    return Verdict(fell and found.kl < KL_FELL * found.first_kl, f"{found.evidence}, limit {limit:g} less")


def worse_than_start(history: History, limit: float) -> Verdict:
    """Judge whether the KL has risen since the first evaluation, or the accuracy has fallen with no gain in KL."""
    found = _evaluations(history)
    is_worse = found.kl > limit * max(found.first_kl, 0.0) + EVAL_MARGIN
    if found.accuracy is not None and found.kl >= KL_FELL * found.first_kl:
        is_worse = is_worse or found.first_accuracy - found.accuracy > ACCURACY_LOSS
    return Verdict(is_worse, f"{found.evidence}, limit {limit:g} times the first KL")


def ends_disagree(history: History, limit: float) -> Verdict:
    """Judge whether much of the KL is at the tokens that end responses, and there is a KL worth the question."""
    share, kl = history.mean("eval/end_kl_share", 1), history.mean("eval/kl", 1)
    return Verdict(share > limit and kl > KL_MARGIN, f"eval/end_kl_share {share:.3g} of {kl:.3g} nats, limit {limit:g}")


def sure_and_wrong(history: History, limit: float) -> Verdict:
    """Judge whether the student has become sure of tokens that the teacher denies."""
    name = "eval/sure_and_wrong_share"
    now, first = history.last(name, 2)[-1], history.first(name)
    most = limit * max(first, MIN_WRONG)
    return Verdict(now > most, f"{name} {first:.3g} -> {now:.3g}, limit {most:.3g}")


def stale_rollouts(history: History, limit: float) -> Verdict:
    """Judge whether stale rollouts are as far from the student as the student is from the teacher."""
    kl = history.any_new(*KL)
    moved, gap = history.mean(STALE_KL, 3), history.mean(kl, 3)
    evidence = f"{STALE_KL} {moved:.3g}, {kl} {gap:.3g} (means of 3 steps), limit {limit:g} times"
    return Verdict(moved > max(limit * abs(gap), KL_MARGIN), evidence)


class _Evaluations(NamedTuple):
    """The first evaluation and the newest."""

    first_kl: float
    kl: float
    first_accuracy: float
    accuracy: float | None
    evidence: str


def _evaluations(history: History) -> _Evaluations:
    kl = history.any_new(*EVAL_KL)
    now, first = history.last(kl, 2)[-1], history.first(kl)
    evidence = f"{kl} {first:.3g} -> {now:.3g}"
    try:
        accuracy, first_accuracy = history.last("eval/accuracy", 2)[-1], history.first("eval/accuracy")
    except NoNumbers:
        return _Evaluations(first, now, 0.0, None, evidence)
    evidence += f", eval/accuracy {first_accuracy:.3g} -> {accuracy:.3g}"
    return _Evaluations(first, now, first_accuracy, accuracy, evidence)


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        name: of `gkd.config.schema.HEALTH_CHECKS`.
        limit: `health.limits` replaces it.
        cause: likely causes, one sentence without a stop.
        change: what to change, one sentence without a stop.
        is_of_evaluation: it has a verdict only at evaluations.
    """

    name: str
    limit: float
    judge: Judge
    cause: str
    change: str
    is_of_evaluation: bool = False


CHECKS = (
    Check(
        "truncated", 0.5, truncated,
        "the student no longer generates its end token, repeats itself, or has too few tokens",
        "read `samples/`; check `rollout.stop_token_ids` and `data.chat_template`; raise `data.max_response_length`",
    ),
    Check(
        "repetition", 0.4, above("rollout/repeated_4gram_share", 3),
        "the student is stuck in loops, which its own samples then reinforce",
        "lower `actor.optim.lr`; lower `data.max_response_length` until it ends its responses; check "
        "`data.chat_template`",
    ),
    Check(
        "end_of_sequence", 0.1, below("loss/teacher_end_probability", 3),
        "student and teacher end their responses with different tokens, or have different chat templates",
        "compare `eos_token_id` in the `generation_config.json` of both models; set `rollout.stop_token_ids` to the "
        "teacher's end tokens; check `data.chat_template`",
    ),
    Check(
        "teacher_mismatch", 0.3, teacher_mismatch,
        "the teacher has other token ids or other weights than intended, or the student has collapsed",
        "check that `teacher.name` is the intended teacher and shares the student's tokenizer; if the overlap was "
        "high before, lower `actor.optim.lr`",
    ),
    Check(
        "overlap_falls", 0.1, overlap_falls,
        "updates are too large, or the responses have moved to text on which the teacher is not reliable",
        "lower `actor.optim.lr`; with `reverse_kl` or k1-k3 add `forward_kl` in `distill.losses`",
    ),
    Check(
        "entropy_collapse", 0.2, entropy_collapse,
        "the loss rewards few modes: the student leaves out what the teacher finds probable",
        "set `distill.loss` to `jsd`, `skew_reverse_kl` or `forward_kl`, or lower `actor.optim.lr`",
    ),
    Check(
        "importance_clipped", 0.05, above("loss/importance_clipped", 3),
        "the rollouts are stale, or the engines sample at another temperature than the loss uses",
        "lower `trainer.max_staleness` or choose a `trainer.scheduler` with less prefetching; set "
        "`rollout.temperature` to `teacher.temperature`",
    ),
    Check(
        "gradient_spikes", 10.0, gradient_spikes,
        "single responses have extreme losses, or the learning rate is at the edge of stability",
        "lower `actor.optim.lr`, or lengthen `actor.optim.warmup_steps`; lower `actor.optim.clip_grad`",
    ),
    Check(
        "no_gap", 0.005, no_gap,
        "student and teacher are the same model, or the student is already distilled",
        "compare `model.path` with the teacher's folder",
    ),
    Check(
        "kl_rises", 1.5, kl_rises,
        "the learning rate is too high or the warm-up too short",
        "lower `actor.optim.lr`, or lengthen `actor.optim.warmup_steps`",
    ),
    Check(
        "accuracy_falls", 0.1, accuracy_falls,
        "the student imitates the teacher's text but not its results: answers are cut off, end in another format, or "
        "the teacher is worse than the student",
        "read `samples/`; check `data.max_response_length` and `eval.answer_marker`; measure the teacher's own "
        "accuracy",
        is_of_evaluation=True,
    ),
    Check(
        "worse_than_start", 1.2, worse_than_start,
        "the learning rate is too high, or the student has collapsed",
        "resume from an earlier checkpoint (`trainer.resume`) with a lower `actor.optim.lr`",
        is_of_evaluation=True,
    ),
    Check(
        "engine_logprobs", 0.02, above(FRESH_KL, 3),
        "the engines do not have the weights that train, or compute another model",
        "set `weight_sync.verify` to `always`; if the digests agree, set `model.dtype` to `float32` to compare",
    ),
    Check(
        "stale_rollouts", 0.9, stale_rollouts,
        "the weights change too much between generation and training",
        "lower `trainer.max_staleness` or choose a `trainer.scheduler` with less prefetching; lower `actor.optim.lr`",
    ),
    Check(
        "environment_errors", 0.05, above("rollout/environment_errors", 3),
        "the environment raises, exceeds its time limit, or returns messages that cannot be rendered",
        "read the first errors in the log; raise `rollout.environment_timeout_s` or `rollout.environment_workers`",
    ),
    Check(
        "ends_disagree", 0.3, ends_disagree,
        "student and teacher end with different tokens, or the teacher's template expects text after the end",
        "compare `eos_token_id` in the `generation_config.json` of both models; set `rollout.stop_token_ids` to the "
        "teacher's end tokens; check `data.chat_template`",
        is_of_evaluation=True,
    ),
    Check(
        "sure_and_wrong", 3.0, sure_and_wrong,
        "the learning rate is too high, or the loss rewards few modes",
        "lower `actor.optim.lr`; set `distill.loss` to `forward_kl` or `jsd`; `gkd where` names the tokens",
        is_of_evaluation=True,
    ),
    Check(
        "paired", 0.9, below("loss/paired", 3),
        "responses hold special tokens without a pair, or bytes that are not UTF-8",
        "read `samples/`; name the pairs in `teacher.special_tokens`",
    ),
    Check(
        "canonical", 0.5, below("loss/canonical", 3),
        "the student learns to write the teacher's tokens, because the two segment the text differently",
        "set `distill.units` to `text`",
    ),
)  # fmt: skip
# These compare the engine's distribution with the student's at the temperature of the loss.
NEED_EQUAL_SAMPLING = ("engine_logprobs", "stale_rollouts")
