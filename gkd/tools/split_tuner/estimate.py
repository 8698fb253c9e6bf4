"""Estimate the time of a step for any split of the GPUs, from the rates of a measured run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gkd.config.schema_trainer import AHEAD, STREAM


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds. A GPU works at the same rate in a pool of another size."""

    # An engine's pass that decodes b sequences and prefills p tokens takes pass_s + sequence_s b + prefill_s p.
    pass_s: float
    sequence_s: float
    prefill_s: float
    hand_over_s: float  # time of an engine between two passes, per finished sequence
    batch_s: float  # time of a batch's generation in addition to its engines' time; 0 for a stream
    score_s: float  # time of a teacher worker, per sequence
    score_token_s: float  # and per token of it, prompt and response
    train_s: float  # time of the actor, per step
    train_token_s: float  # and per token of the largest data-parallel group
    sync_s: float  # duration of a weight sync
    other_s: float  # time of a step outside the stages of the pools


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of a step, independent of the split."""

    n_prompts: int  # trainer.global_batch_size
    n_on_policy: float  # prompts per step with rollouts, on average; the others take the dataset's response
    n: int  # rollout.n
    max_num_seqs: int  # sequences in one pass of an engine
    prompt_tokens: float  # mean
    dataset_tokens: float  # mean of a dataset response
    response_tokens: float  # mean of a rollout
    longest_tokens: float  # mean of the longest rollout of each step
    early_parts: bool  # see `gkd.config.schema.Derived`


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a split that its speed depends on."""

    dp: int  # data-parallel groups of the actor
    engines: int
    workers: int  # teacher workers


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and of each pool's work in it. Schedulers overlap the work of different pools."""

    step_s: float
    rollout_s: float
    scoring_s: float
    training_s: float


def estimate(scheduler: str, max_staleness: int, sizes: Sizes, workload: Workload, rates: Rates) -> StepTime:
    """Return the time of a step: the sum of sequential stages, the maximum of concurrent ones.

    The constants 2/3, 1/2 and 1/3 are about right for the lengths of language models; docs/split.md lists the error.
    """
    w, r = workload, rates
    n_rollouts, n_dataset = w.n_on_policy * w.n, w.n_prompts - w.n_on_policy
    tokens = n_rollouts * (w.prompt_tokens + w.response_tokens) + n_dataset * (w.prompt_tokens + w.dataset_tokens)
    longest = w.prompt_tokens + w.longest_tokens
    last_score_s = r.score_s + r.score_token_s * longest
    scoring_s = ((n_rollouts + n_dataset) * r.score_s + tokens * r.score_token_s) / sizes.workers
    scoring_s = max(scoring_s, last_score_s)
    training_s = r.train_s + r.train_token_s * max(tokens / sizes.dp, longest)  # a sequence is on one rank
    after_s = r.sync_s + r.other_s
    if scheduler == STREAM:
        rollout_s = _stream_s(max_staleness, n_rollouts / sizes.engines, scoring_s, training_s, w, r)
        step_s = max(rollout_s + r.sync_s, training_s + after_s, scoring_s)
        return StepTime(step_s, rollout_s, scoring_s, training_s)
    # Without a queue, an engine makes as many passes as its longest response has tokens. With one, a long response
    # often starts late, and the engine is nearly empty at the end.
    passes = n_rollouts / sizes.engines / w.max_num_seqs * w.response_tokens + 2 / 3 * w.longest_tokens
    most = min(math.ceil(w.n_on_policy / sizes.engines) * w.n, n_rollouts)  # sequences of the busiest engine
    rollout_s = r.pass_s * max(passes, w.longest_tokens) + most * _sequence_s(w, r) + r.batch_s
    # The teacher begins when responses of half the mean length are complete.
    began_s = rollout_s * w.response_tokens / w.longest_tokens / 2
    late_s = max(last_score_s, scoring_s - (rollout_s - began_s))  # time from the last response to its score
    if AHEAD[scheduler] == 0:
        step_s = rollout_s + late_s + training_s + after_s
    elif AHEAD[scheduler] == 1:
        # The loop waits w for scores, trains, then waits for the next responses, whose scores come `late_s` after them.
        # So w = late_s - after_s if the responses are last, and half of what is missing if the training is.
        wait_s = max((rollout_s + late_s - training_s - after_s) / 2, 0.0)
        if wait_s + training_s <= rollout_s:
            wait_s = max(late_s - after_s, 0.0)
        step_s = max(max(rollout_s, training_s + wait_s) + after_s, scoring_s)
    else:
        step_s = max(max(rollout_s, training_s) + after_s, scoring_s)
    return StepTime(step_s, rollout_s, scoring_s, training_s)


def _sequence_s(w: Workload, r: Rates) -> float:
    """Return the part of an engine's time that is proportional to its sequences, for one of mean length."""
    return r.sequence_s * w.response_tokens + r.prefill_s * w.prompt_tokens + r.hand_over_s


def _stream_s(bound: int, per_engine: float, scoring_s: float, training_s: float, w: Workload, r: Rates) -> float:
    """Return the engines' time in a step of a stream: what the work takes, or what the staleness bound demands.

    Args:
        per_engine: sequences of an engine per step.
    """
    running = min(w.max_num_seqs, per_engine * (bound + 1))
    fixed_s = per_engine * _sequence_s(w, r) + running * r.prefill_s * (w.prompt_tokens + w.response_tokens / 2)
    work_s = fixed_s + per_engine * w.response_tokens / running * r.pass_s
    # The longest response, too, must be trained on within bound + 1 steps of x seconds each. While it grows by
    # x - fixed_s seconds of passes per step, `longest_tokens` passes take longest_s x / (x - fixed_s). Then a third of
    # the scoring and the rest of the training follow. So (bound + 1) x = longest_s x / (x - fixed_s) + end_s.
    longest_s = w.longest_tokens * r.pass_s
    end_s = scoring_s / 3 + (r.train_s if w.early_parts else training_s) + r.other_s
    b = (bound + 1) * fixed_s + longest_s + end_s
    bound_s = (b + math.sqrt(b * b - 4 * (bound + 1) * end_s * fixed_s)) / (2 * (bound + 1))
    return max(work_s, bound_s)
