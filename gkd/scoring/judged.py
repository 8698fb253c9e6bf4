"""Driver side of rewards: a scoring role that also lets each submitted chunk be judged, while the teacher scores it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ray

from gkd.cluster.calls import gather
from gkd.config.declare import is_path
from gkd.config.schema import Config, Derived
from gkd.config.schema_teacher import PROMPT_FUNCTION, DistillConfig
from gkd.data.row_files import RowTable
from gkd.data.template import Tools
from gkd.log import get_logger
from gkd.roles import Computation, Roles, ScoringRole
from gkd.scoring.reward.judging import TRAINING, VALIDATION, student_tokenizer
from gkd.scoring.reward.worker import UNKNOWN
from gkd.types import FileDigest, PendingScores, Prompt, Recording, Rollout, RolloutChunk, Sample, ScoredChunk
from gkd.user_code import search_path

log = get_logger("reward")

# Concurrency group of the scoring endpoints; they judge while their other threads wait for the teacher.
JUDGING = "judging"


class JudgedScoring:
    """Implement `gkd.roles.ScoringRole` over another one, and judge the student's responses of each chunk.

    Judging starts with `submit`. Recordings do not include the values: restored chunks are judged again, so a resumed
    or replayed run has the same ones if the functions are deterministic.

    Args:
        endpoints: the scoring endpoints, by data-parallel group.
        prompts: `TRAINING` or `VALIDATION`, the set that the chunks answer.
        n_functions: of this set.
        groups: keys of functions that get all responses to a prompt, see `Judging.judge`. With teacher.prompt_function
            a chunk is scored when it has been judged.
        with_numbers: adds advantages and factors to a whole batch; `list`: no setting needs them.
    """

    def __init__(
        self,
        inner: ScoringRole,
        endpoints: Sequence[Any],
        timeout_s: float,
        prompts: str,
        n_functions: int,
        with_numbers: Callable[[Sequence[ScoredChunk]], list[ScoredChunk]] = list,
        groups: Collection[str] = (),
    ) -> None:
        self._inner = inner
        self._endpoints = list(endpoints)
        self._timeout_s = timeout_s
        self._prompts = prompts
        self._n_functions = n_functions
        self._with_numbers = with_numbers
        self._with_groups = bool(groups)
        self._with_prompts = PROMPT_FUNCTION in groups
        self._logged: set[str] = set()  # reasons of unknown values

    def submit(self, chunk: RolloutChunk) -> PendingScores:
        if not (self._with_prompts and chunk.on_policy):
            return self._judged(self._inner.submit(chunk))
        call = self._endpoints[chunk.dp_rank].prompted.options(num_returns=2, concurrency_group=JUDGING)
        rollouts, values = call.remote(chunk.ref)
        return replace(self._inner.submit(replace(chunk, ref=rollouts)), rewards=values)

    def collect(self, pending: Sequence[PendingScores]) -> list[ScoredChunk]:
        """As `ScoringRole.collect`, with the values of all chunks that the student generated.

        Raises:
            RewardError, DataError: see `gkd.scoring.reward.judging.Judging.judge`.
        """
        if not self._with_prompts:
            scored = self._inner.collect(pending)
        names = {p.rewards: f"chunk {i} (scoring endpoint {p.rollouts.dp_rank})" for i, p in enumerate(pending)}
        names.pop(None, None)
        values = gather({name: ref for ref, name in names.items()}, "judging rollouts", self._timeout_s)
        if self._with_prompts:  # a failed function is raised here: ranks would wait for the one that gets its error
            scored = self._inner.collect(pending)
        batch = []
        for chunk, p in zip(scored, pending, strict=True):
            if p.rewards is not None:
                table = self._values(values[names[p.rewards]], p.rollouts)
                rewards = self._known(table[:, : self._n_functions])
                chunk = replace(chunk, rewards=rewards, of_group=table[:, self._n_functions :])
            batch.append(chunk)
        return self._with_numbers(batch)

    def restore(self, folder: Path, label: str) -> list[PendingScores]:
        return [self._judged(pending) for pending in self._inner.restore(folder, label)]

    def record(
        self, chunks: Sequence[PendingScores | ScoredChunk], folder: Path, label: str, *, scored: bool
    ) -> Recording:
        return self._inner.record(chunks, folder, label, scored=scored)

    def record_finished(
        self, recording: Recording, *, wait: bool, timeout_s: float | None = None
    ) -> dict[str, FileDigest] | None:
        return self._inner.record_finished(recording, wait=wait, timeout_s=timeout_s)

    def take_computations(self, *, wait: bool) -> Mapping[str, Sequence[Computation]]:
        return self._inner.take_computations(wait=wait)

    def judge(self, samples: Sequence[Sample]) -> Sequence[float]:
        """Return the value of each greedy response; blocks. An undecided one counts as the worst, and as 0 at most.

        All are NaN if none is known. Raises as `collect`.
        """
        rollouts = [_rollout(i // len(self._endpoints), sample) for i, sample in enumerate(samples)]
        shares = [rollouts[group :: len(self._endpoints)] for group in range(len(self._endpoints))]
        refs = {f"scoring endpoint {group}": self._judge(group, share) for group, share in enumerate(shares) if share}
        values = np.empty(len(samples))
        replies = gather(refs, "judging greedy responses", self._timeout_s)
        for group in range(len(refs)):
            values[group :: len(self._endpoints)] = np.frombuffer(replies[f"scoring endpoint {group}"], "<f8")
        values = self._known(values)
        if np.isnan(values).all():
            return values.tolist()
        worst = min([0.0, *values[~np.isnan(values)].tolist()])
        decided: list[float] = np.where(np.isnan(values), worst, values).tolist()
        return decided

    def _judged(self, pending: PendingScores) -> PendingScores:
        if not pending.rollouts.on_policy:
            return pending
        return replace(pending, rewards=self._judge(pending.rollouts.dp_rank, pending.rollouts.ref))

    def _judge(self, group: int, rollouts: Any) -> Any:
        """Return the handle of the values of rollouts, or of their handle."""
        return self._endpoints[group].judge.options(concurrency_group=JUDGING).remote(rollouts, self._prompts)

    def _values(self, data: bytes, rollouts: RolloutChunk) -> np.ndarray:
        """Return the values of a chunk, or of the part of one: [n_sequences, columns] float64, see `Judging.judge`."""
        values = np.frombuffer(data, "<f8").reshape(-1, self._n_functions + 2 * self._with_groups)
        indices = rollouts.sequence_indices
        return values if indices is None else values[indices]

    def _known(self, values: np.ndarray) -> np.ndarray:
        """Return values with NaN for those that are unknown, and log each reason when it first applies."""
        for reason, number in UNKNOWN.items():
            n = int((np.isnan(values) if math.isnan(number) else values == number).sum())
            if n and reason not in self._logged:
                self._logged.add(reason)
                text = "%d of %d %s values are unknown: %s (later ones: reward/undecided)"
                log.warning(text, n, values.size, self._prompts, reason)
        return np.where(np.isfinite(values), values, np.nan)


def workers_per_endpoint(config: Config, dp_size: int) -> int:
    """Return the processes that judge for each data-parallel group; also the threads that wait for them."""
    return -(-config.reward.workers // dp_size)


def init_judging(
    config: Config,
    derived: Derived,
    train: Sequence[Prompt],
    validation: Sequence[Prompt],
    endpoints: Sequence[Any],
    timeout_s: float,
    tools: Tools = (),
) -> None:
    """Let the scoring endpoints start the processes that judge; nothing if no function judges responses.

    No CPUs are reserved: they judge while the engines and the teacher work.

    Args:
        train, validation: prompts, loaded with the rows that the functions need.
        tools: of rollout.environment.

    Raises:
        RewardError: see `gkd.scoring.reward.judging.Judging`.
    """
    if not (derived.rewards or derived.metrics or derived.groups):
        return
    functions = {TRAINING: derived.rewards, VALIDATION: derived.metrics}
    n_workers = workers_per_endpoint(config, derived.dp_size)
    rows = [ray.put(RowTable.of(prompts)) for prompts in (train, validation)]
    calls = [endpoint.init_judging.options(concurrency_group=JUDGING) for endpoint in endpoints]
    # An endpoint cannot import the class of a tokenizer that the model's own code defines, so it loads that one itself.
    tokenizer = None if config.model.trust_remote_code else student_tokenizer(config)
    refs = [call.remote(functions, n_workers, search_path(), *rows, tokenizer, tools) for call in calls]
    gather({f"scoring endpoint {i}": ref for i, ref in enumerate(refs)}, "start", timeout_s)


def with_judges(roles: Roles, config: Config, derived: Derived, endpoints: Sequence[Any]) -> Roles:
    """Return the roles with the judging that the settings require."""
    scoring = roles.scoring
    timeout_s = config.trainer.stage_timeout_s
    if derived.rewards or derived.groups:
        # Held-out responses answer other prompts: no reward of training belongs to them.
        roles = replace(roles, scoring=judged_training(scoring, config, derived, endpoints), evaluation=scoring)
    if derived.metrics:
        judge = JudgedScoring(scoring, endpoints, timeout_s, VALIDATION, len(derived.metrics))
        roles = replace(roles, judge=judge)
    return roles


def judged_training(scoring: ScoringRole, config: Config, derived: Derived, endpoints: Sequence[Any]) -> JudgedScoring:
    """Return the scoring of training prompts; what it collects is a whole batch."""
    weights = [entry.weight for entry in config.reward.functions]
    numbers: Callable[[Sequence[ScoredChunk]], list[ScoredChunk]] = list
    if derived.loss.has_rewards or config.distill.response_weight != "none":
        numbers = partial(with_numbers, distill=config.distill, weights=weights, n=config.rollout.n)
    timeout_s = config.trainer.stage_timeout_s
    return JudgedScoring(scoring, endpoints, timeout_s, TRAINING, len(weights), numbers, dict(derived.groups))


def _rollout(index: int, sample: Sample) -> Rollout:
    """Return a greedy response in the form that endpoints judge."""
    is_own = np.ones(len(sample.response_ids), bool)
    is_own[sample.observed] = False
    return Rollout(
        prompt_id=sample.prompt_id,
        sample_index=index,
        prompt_ids=np.array(sample.prompt_ids, np.int32),
        response_ids=np.array(sample.response_ids, np.int32),
        rollout_logprobs=np.zeros(is_own.sum(), np.float32),
        version_spans=(),
        finish_reason="length" if sample.truncated else "environment_error" if sample.failed else "stop",
        own=is_own if sample.observed else None,
        reward=sample.reward,
        messages=msgspec.json.encode(sample.messages) if sample.messages else None,
    )


# The driver has all rewards of a batch, 8 bytes per sequence and function. So means are over the whole group or batch,
# whichever data-parallel groups, chunks or parts of a stream's chunks have its sequences.


_EPSILON = 1e-6
_NEUTRAL = np.array([0, 1], np.float32)  # advantage and factor of a response that no function judges


def advantages_of(rewards: np.ndarray, groups: np.ndarray, kind: str) -> np.ndarray:
    """Return (R - mean) / (std + 1e-6) of each response: [n] float64. GRPO, arXiv:2402.03300.

    Args:
        rewards: [n] float64. NaN is undecided: the response has no part in mean and std, and the advantage 0.
        groups: [n] int, the prompt of each.
        kind: distill.advantage. group: mean and standard deviation (with divisor n) of the responses of the same
            prompt. batch: of all. none: the rewards themselves.
    """
    decided = ~np.isnan(rewards)
    if not decided.all():
        advantages = np.zeros(len(rewards))
        advantages[decided] = advantages_of(rewards[decided], groups[decided], kind)
        return advantages
    if kind == "none":
        return rewards
    _, group_of = np.unique(groups if kind == "group" else np.zeros_like(groups), return_inverse=True)
    n = np.bincount(group_of)
    centered = rewards - (np.bincount(group_of, rewards) / n)[group_of]
    std = np.sqrt(np.bincount(group_of, centered**2) / n)
    normalized: np.ndarray = centered / (std[group_of] + _EPSILON)
    return normalized


def response_factors(rewards: np.ndarray, groups: np.ndarray, kind: str, largest: float) -> np.ndarray:
    """Return the weight of each response, [n] float64, before `normalized`: distill.response_weight.

    Args:
        rewards: [n] float64. NaN is undecided: no part in a pass rate, and neither correct nor wrong.
        groups: [n] int, the prompt of each.
        kind: pass_rate: p (1 - p), p the share of correct responses of the same prompt (PACED, arXiv:2603.11178).
            correct, wrong: 1 for these. none: 1.
        largest: a reward of at least half of it is correct.
    """
    if kind == "none":
        return np.ones(len(rewards))
    decided = ~np.isnan(rewards)
    correct = decided & (rewards >= largest / 2)
    if kind != "pass_rate":
        return (correct if kind == "correct" else decided & ~correct).astype(np.float64)
    _, prompts = np.unique(groups, return_inverse=True)
    n_decided = np.maximum(1, np.bincount(prompts, decided))
    pass_rate = (np.bincount(prompts, correct) / n_decided)[prompts]
    weights: np.ndarray = pass_rate * (1 - pass_rate)
    return weights


def normalized(weights: np.ndarray) -> np.ndarray:
    """Return weights whose mean over the responses with one above 0 is 1; all 0 stay so."""
    some = weights > 0
    scaled: np.ndarray = weights / weights[some].mean() if some.any() else weights
    return scaled


def with_numbers(
    batch: Sequence[ScoredChunk], distill: DistillConfig, weights: Sequence[float], n: int
) -> list[ScoredChunk]:
    """Return a whole batch with the advantage and the factor of each sequence. `weights` are those of the functions.

    Dataset responses are not judged: their advantage is 0, and their factor 1.
    """
    judged = [chunk for chunk in batch if chunk.rewards is not None]
    numbers = {id(chunk): np.tile(_NEUTRAL, (chunk.rollouts.n_sequences, 1)) for chunk in batch}
    if judged:
        factors_of_sum = np.asarray(weights, np.float64)  # NaN in a sum: a function is undecided
        rewards = np.concatenate([chunk.rewards @ factors_of_sum for chunk in judged if chunk.rewards is not None])
        groups = np.concatenate([chunk.rollouts.sample_index for chunk in judged]) // n  # rollout.n: prompts
        advantages = advantages_of(rewards, groups, distill.advantage)
        if is_path(distill.response_weight):
            factors = np.concatenate([chunk.of_group[:, 0] for chunk in judged if chunk.of_group is not None])
        else:
            factors = response_factors(rewards, groups, distill.response_weight, sum(weights))
        values = np.stack([advantages, normalized(factors)], axis=1).astype(np.float32)
        ends = np.cumsum([chunk.rollouts.n_sequences for chunk in judged])
        numbers |= zip(map(id, judged), np.split(values, ends[:-1]), strict=True)
    return [replace(chunk, numbers=numbers[id(chunk)]) for chunk in batch]
