"""sync, one_step_off, two_step_off in the simulation: `gkd.pipeline.source` in other words, without the work.

No other batch is on the engines meanwhile, so each batch is one calculation (`answer_batch`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gkd.config.schema_trainer import AHEAD
from gkd.data.chunks import linger_s
from gkd.tools.split_tuner.dispatch import answer_batch
from gkd.tools.split_tuner.outcome import Outcome, Totals, train_seconds
from gkd.tools.split_tuner.rates import Rates, Sizes, Workload
from gkd.tools.split_tuner.teacher import Teacher


@dataclass(frozen=True, slots=True)
class _Batch:
    version: int
    answered_s: float
    scored_s: float
    tokens: np.ndarray  # [m] prompt and response, of all sequences
    groups: np.ndarray  # [m]
    response_tokens: float
    n_rollouts: int
    engine_s: float  # of all engines together


def run(
    scheduler: str, sizes: Sizes, workload: Workload, rates: Rates, *, n_steps: int, warm_up: int, seed: int
) -> Outcome:
    """Simulates `warm_up` steps and then `n_steps` that count."""
    ahead = AHEAD[scheduler]
    rng = np.random.default_rng(seed)
    teacher, totals = Teacher(rates, sizes.workers), Totals()
    queue: list[_Batch] = []
    now_s = free_s = began_s = engine_s = train_total_s = 0.0  # free_s: when the engines have answered all batches
    next_number, teacher_before_s = 0, 0.0
    for step in range(warm_up + n_steps):
        if step == warm_up:
            began_s, teacher_before_s, totals, engine_s, train_total_s = now_s, teacher.busy_s, Totals(), 0.0, 0.0
        while next_number <= step + ahead:
            batch = _answer(next_number, step, max(now_s, free_s), sizes, workload, rates, rng, teacher)
            free_s, engine_s = batch.answered_s, engine_s + batch.engine_s
            queue.append(batch)
            next_number += 1
        batch = queue.pop(0)
        answered_s = max(now_s, batch.answered_s)
        scored_s = max(answered_s, batch.scored_s)
        train_s = train_seconds(batch.tokens, batch.groups, sizes, workload, rates)
        trained_s = scored_s + train_s
        settled_s = max(trained_s, free_s)
        totals.waited_s["rollout"] += answered_s - now_s + settled_s - trained_s
        totals.waited_s["teacher"] += scored_s - answered_s
        totals.waited_s["actor"] += train_s
        totals.n_steps += 1
        totals.response_tokens += batch.response_tokens
        totals.ages[step - batch.version] += batch.n_rollouts
        train_total_s += train_s
        now_s = settled_s + rates.sync_s + rates.other_s
    busy_s = {"rollout": engine_s, "teacher": teacher.busy_s - teacher_before_s, "actor": train_total_s}
    return totals.outcome(scheduler, now_s - began_s, busy_s, sizes)


def _answer(
    number: int,
    version: int,
    start_s: float,
    sizes: Sizes,
    workload: Workload,
    rates: Rates,
    rng: np.random.Generator,
    teacher: Teacher,
) -> _Batch:
    """All answers to a batch, and the teacher asked about them."""
    n_on_policy = workload.on_policy(number)
    place = np.arange(n_on_policy).repeat(workload.n)  # of each sequence's prompt, among those the student answers
    group_of = place % sizes.dp
    lengths = workload.lengths.draw(rng, len(place), number)
    engine_of, finished_s = answer_batch(lengths, workload, rates, sizes.engines)
    order = np.argsort(engine_of, kind="stable")
    waits_s = linger_s(workload.n_prompts * workload.n, soon=sizes.engines > 1)
    arrived, engine_s, last_s = np.empty(len(place)), 0.0, 0.0
    for mine in np.split(order, np.cumsum(np.bincount(engine_of, minlength=sizes.engines))[:-1]):
        if len(mine):
            finished = finished_s[mine]
            arrived[mine] = chunk_times(finished, group_of[mine], workload.chunk_size, waits_s) + rates.batch_s
            engine_s += float(finished.max())
            last_s = max(last_s, float(finished.max()) + rates.batch_s)
    answered_s = start_s + last_s
    n_dataset = workload.n_prompts - n_on_policy
    of_dataset = workload.prompt_tokens + workload.dataset_tokens
    tokens = np.concatenate([lengths + workload.prompt_tokens, np.full(n_dataset, of_dataset)])
    groups = np.concatenate([group_of, np.arange(n_on_policy, workload.n_prompts) % sizes.dp])
    asked = np.concatenate([start_s + arrived, np.full(n_dataset, start_s)])
    if not workload.overlap:
        asked[:] = answered_s
    in_order = np.argsort(asked, kind="stable")
    scored_s = answered_s
    for at_s, n_tokens in zip(asked[in_order].tolist(), tokens[in_order].tolist(), strict=True):
        scored_s = max(scored_s, teacher.score(at_s, (n_tokens,)))
    response_tokens = float(lengths.sum()) + n_dataset * workload.dataset_tokens
    return _Batch(version, answered_s, scored_s, tokens, groups, response_tokens, len(place), engine_s)


def chunk_times(finished: np.ndarray, groups: np.ndarray, chunk_size: int, linger_s: float) -> np.ndarray:
    """[m]: when each of an engine's sequences leaves it, see `gkd.rollout.coalesce.Coalescer`.

    A chunk leaves when it is full, `linger_s` after its first sequence, or when the engine has nothing left.
    """
    left, last_s = np.empty(len(finished)), finished.max()
    for group in np.unique(groups):
        mine = np.flatnonzero(groups == group)
        mine = mine[np.argsort(finished[mine], kind="stable")]
        full_s = -1.0  # when the chunk before was full: what is left of that moment has its deadline
        while len(mine):
            if finished[mine[0]] != full_s:
                due_s = finished[mine[0]] + linger_s
            chunk = mine[:chunk_size][finished[mine[:chunk_size]] <= due_s]
            full_s = finished[chunk[-1]] if len(chunk) == chunk_size else -1.0
            left[chunk] = full_s if full_s >= 0 else min(due_s, last_s)
            mine = mine[len(chunk) :]
    return left
