"""Estimate step times of many splits in closed form, to choose which ones to simulate."""

from __future__ import annotations

import numpy as np

from gkd.config.schema_trainer import AHEAD
from gkd.tools.split_tuner.rates import Lengths, Rates, Workload


def estimate(
    scheduler: str,
    dp: np.ndarray,
    engines: np.ndarray,
    workers: np.ndarray,
    workload: Workload,
    rates: Rates,
    max_staleness: int,
) -> np.ndarray:
    """Return [splits] float64, seconds per step: the sum of sequential stages, the maximum of concurrent ones.

    Args:
        dp, engines, workers: [splits], see `gkd.tools.split_tuner.rates.Sizes`.
    """
    mean = workload.lengths.mean
    prompts = max(workload.n_on_policy, 1e-9)
    n_rollouts = prompts * workload.n
    tokens = n_rollouts * (mean + workload.prompt_tokens)
    tokens += (workload.n_prompts - workload.n_on_policy) * (workload.dataset_tokens + workload.prompt_tokens)
    score_s = (workload.n_sequences * rates.score_s + tokens * rates.score_token_s) / workers
    train_s = rates.train_s + rates.train_token_s * tokens / dp
    after_s = rates.sync_s + rates.other_s
    per_rollout = rates.sequence_s * mean + rates.prefill_s * workload.prompt_tokens + rates.hand_over_s
    if scheduler not in AHEAD:  # an engine always runs as many sequences as fit
        running = np.minimum(workload.max_num_seqs, np.maximum(1.0, n_rollouts * (1 + max_staleness) / engines))
        rollout_s = n_rollouts / engines * (per_rollout + rates.pass_s * mean / running)
        return np.maximum(np.maximum(rollout_s, train_s) + after_s, score_s)
    most = np.minimum(np.ceil(prompts / engines) * workload.n, n_rollouts)
    longest = _longest(workload.lengths, np.minimum(most, workload.max_num_seqs))
    passes = np.maximum(longest, most / workload.max_num_seqs * mean + longest / 2 * (most > workload.max_num_seqs))
    rollout_s = rates.pass_s * passes + most * per_rollout + rates.batch_s
    late_s = np.maximum(score_s - rollout_s, 0.0) if workload.overlap else score_s
    if scheduler == "sync":
        return rollout_s + late_s + train_s + after_s
    if AHEAD[scheduler] == 1:
        # The loop waits w for scores, trains, waits for answers; the scores are there `late_s` after those, so
        # w = late_s - after_s if the answers are last, and half of what is missing if the training is.
        missing_s = np.maximum((rollout_s + late_s - train_s - after_s) / 2, 0.0)
        train_is_last = missing_s + train_s > rollout_s
        missing_s = np.where(train_is_last, missing_s, np.maximum(late_s - after_s, 0.0))
        return np.maximum(rollout_s, train_s + missing_s) + after_s
    return np.maximum(np.maximum(rollout_s, train_s) + after_s, score_s)


def _longest(lengths: Lengths, n: np.ndarray) -> np.ndarray:
    """[splits]: approximate maximum of this many response lengths."""
    typical = lengths.tokens.mean(0)
    return np.interp(100.0 * n / (n + 1), lengths.percent, typical)
