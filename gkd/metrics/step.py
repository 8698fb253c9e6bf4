"""The numbers of one step, and its line for people."""

from __future__ import annotations

from collections.abc import Sequence

from gkd.handles import ScoredChunk, SyncReport, TrainStats
from gkd.metrics.pools import shares, waited_for
from gkd.metrics.writer import StageTimers

DATASET_TOKENS = "rollout/dataset_response_tokens"


def staleness_numbers(batch: Sequence[ScoredChunk], step: int) -> dict[str, float]:
    """How many steps before the sequences were written, the student's alone: each counts as old as the oldest part of
    its chunk. Mean, maximum, and the share of each value.
    """
    ages: dict[int, int] = {}
    for chunk in (c.rollouts for c in batch if c.rollouts.on_policy):
        age = step - chunk.policy_version
        ages[age] = ages.get(age, 0) + chunk.n_sequences
    n = sum(ages.values())
    numbers = {f"staleness/share_{age}": count / n for age, count in sorted(ages.items())}
    mean = sum(age * count for age, count in ages.items()) / n if n else 0.0
    return {"staleness/max": float(max(ages, default=0)), "staleness/mean": mean, **numbers}


def step_numbers(
    batch: Sequence[ScoredChunk], stats: TrainStats, report: SyncReport, staleness: dict[str, float]
) -> dict[str, float]:
    """Everything of a step but its times; `rollout/` counts the dataset's responses, too."""
    n_sequences = sum(c.rollouts.n_sequences for c in batch)
    n_tokens = sum(c.rollouts.n_response_tokens for c in batch)
    masses = [c.teacher_mass * c.rollouts.n_response_tokens for c in batch if c.teacher_mass is not None]
    return {
        "loss/total": stats.loss,
        "loss/tokens": float(stats.n_loss_tokens),
        "optim/grad_norm": stats.grad_norm,
        "optim/lr": stats.lr,
        "rollout/sequences": float(n_sequences),
        "rollout/on_policy_sequences": float(sum(c.rollouts.n_sequences for c in batch if c.rollouts.on_policy)),
        "rollout/prompt_tokens": float(sum(c.rollouts.n_prompt_tokens for c in batch)),
        "rollout/response_tokens": float(n_tokens),
        DATASET_TOKENS: float(sum(c.rollouts.n_response_tokens for c in batch if not c.rollouts.on_policy)),
        "rollout/response_length_mean": n_tokens / n_sequences,
        "perf/group_tokens_max": float(_heaviest(batch)),
        "rollout/cut_share": sum(c.rollouts.n_truncated for c in batch) / n_sequences,
        **({"teacher/topk_mass": sum(masses) / n_tokens} if masses else {}),
        "teacher/score_bytes": float(sum(c.n_teacher_bytes for c in batch)),
        **staleness,
        "weight_sync/bytes": float(report.n_bytes),
        "weight_sync/verified_tensors": float(report.verified_tensors),
        **stats.extra,
    }


def _heaviest(batch: Sequence[ScoredChunk]) -> int:
    """Tokens of the data-parallel group that has most, as they were written; `gkd.data.balance` may even them out."""
    tokens: dict[int, int] = {}
    for chunk in (c.rollouts for c in batch):
        tokens[chunk.dp_rank] = tokens.get(chunk.dp_rank, 0) + chunk.n_prompt_tokens + chunk.n_response_tokens
    return max(tokens.values())


def with_rate(numbers: dict[str, float], timers: StageTimers, scheduler: str) -> dict[str, float]:
    """The step's times so far, its response tokens a second, and who held it up."""
    times = timers.report()
    rate = {"perf/response_tokens_per_s": numbers["rollout/response_tokens"] / times["time/step_s"]}
    return times | rate | shares(numbers | times, scheduler)


def step_line(step: int, total: int, m: dict[str, float], scheduler: str) -> str:
    """One line a step for people; the stages' seconds are those that the loop waited for them."""
    pool, share = waited_for(m, scheduler)
    stages = " ".join(f"{name} {m[f'time/{name}_s']:.2f}" for name in ("rollout", "teacher", "train", "weight_sync"))
    return (
        f"step {step}/{total}  loss {m['loss/total']:.4f}  grad {m['optim/grad_norm']:.3f}  "
        f"tokens {m['rollout/response_tokens']:.0f}  {m['time/step_s']:.2f} s ({stages})  "
        f"waits for {pool} {share:.0%}"
    )
