"""Rows of the metrics of rewards, see `gkd.metrics.catalog`."""

from __future__ import annotations

from gkd.metrics.catalog import Row

_REWARDS, _TRAINS = "`reward.functions`", "`distill.reward_weight`"
REWARD = (
    Row(
        "reward/mean", "reward", _REWARDS,
        "Weighted sum of the functions, mean over the student's responses of the batch.",
        "Rises, with noise from batch to batch.",
        "Does not rise: see `reward/flat_groups`, then raise `distill.reward_weight`.",
    ),
    Row("reward/std", "reward", _REWARDS, "Standard deviation of the rewards of the batch."),
    Row(
        "reward/flat_groups", "share", _REWARDS,
        "Share of the prompts whose responses all have the same reward. With `distill.advantage: group` their rewards "
        "have no gradient.",
        "Well below 1.",
        "Near 1: the prompts are too easy or too hard for the student; raise `rollout.n`, or change the prompts.",
    ),
    Row(
        "reward/undecided", "responses", _REWARDS,
        "Responses that `math_verify` could not parse or compare in 2 s; they count as 0.",
        "0, or a few of a thousand.",
        "More: read the samples; the student writes expressions that no function should have to evaluate.",
    ),
    Row("reward/<function>/mean", "value", _REWARDS, "Mean of one function over the student's responses, unweighted."),
    Row(
        "loss/reward", "-", _TRAINS,
        "Clipped policy-gradient loss of the rewards, unweighted. Its gradient trains; its value does not inform.",
    ),
    Row(
        "loss/reward_ratio", "ratio", _TRAINS,
        "Probability of the sampled token under the student that trains, divided by that of the engine.",
        "Near 1.",
        "Far from 1: rollouts are stale; choose a scheduler with less prefetching, or lower `trainer.max_staleness`.",
    ),
    Row(
        "loss/reward_clipped", "share", _TRAINS,
        "Share of the student's tokens whose ratio is beyond `distill.reward_clip`, so that their reward has no "
        "gradient.",
        "Below 0.1.",
        "Larger: as `loss/reward_ratio`.",
    ),
)  # fmt: skip
