"""Estimate the time of a step for any split of the GPUs into three pools, and rank those that a run would accept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gkd.config.schema import Config
from gkd.config.schema_trainer import AHEAD, STREAM, TrainerConfig
from gkd.errors import ConfigError

# With more GPUs than this, a pool that is larger than a node consists of whole nodes.
_EVERY_SIZE = 64
# Stands for the address of the planned run's Ray cluster. It is never printed or contacted.
_SOME_CLUSTER = "planned:6379"
_RANKED = 60  # splits of a scheduler in a ranking
_CHECKED = 20_000  # splits of a scheduler that are checked to find them; about 0.5 ms each


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


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`nnodes` x `per_node` GPUs, the two keys of a pool."""

    nnodes: int
    per_node: int

    @property
    def n_gpus(self) -> int:
        return self.nnodes * self.per_node

    def __str__(self) -> str:
        return f"{self.n_gpus}" if self.nnodes == 1 else f"{self.n_gpus} ({self.nnodes}x{self.per_node})"


@dataclass(frozen=True, slots=True)
class Split:
    actor: PoolSize
    rollout: PoolSize
    workers: int  # teacher workers
    teacher_gpus: int  # GPUs of the teacher among those to split; 0 means it has others

    def settings(self, scheduler: str) -> dict[str, object]:
        """Return the keys of a run with this split and scheduler."""
        return {
            "trainer.scheduler": scheduler,
            "trainer.nnodes": self.actor.nnodes,
            "trainer.n_gpus_per_node": self.actor.per_node,
            "rollout.nnodes": self.rollout.nnodes,
            "rollout.n_gpus_per_node": self.rollout.per_node,
        }

    def sizes(self, config: Config) -> Sizes:
        return Sizes(
            self.actor.n_gpus // config.actor.group_size, self.rollout.n_gpus // config.rollout.tp, self.workers
        )


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs to split."""

    n_gpus: int
    per_node: int  # GPUs of a node; the last one may have fewer
    gpus_per_worker: int  # GPUs of a teacher worker
    workers_elsewhere: int  # workers of a teacher with other GPUs; 0 means it takes some of these

    @property
    def nodes(self) -> list[int]:
        """GPUs of each node."""
        whole, rest = divmod(self.n_gpus, self.per_node)
        return [self.per_node] * whole + [rest] * (rest > 0)


@dataclass(frozen=True, slots=True)
class Candidate:
    scheduler: str
    split: Split
    time: StepTime

    @property
    def order(self) -> tuple[float, float]:
        """Step time, then the work of all pools: of equally fast splits the one with more room comes first."""
        return self.time.step_s, self.time.rollout_s + self.time.scoring_s + self.time.training_s


@dataclass(frozen=True, slots=True)
class Excluded:
    """Splits that a run would refuse, all under one scheduler and for one key."""

    scheduler: str
    n: int
    first: ConfigError


@dataclass(frozen=True, slots=True)
class Ranking:
    candidates: tuple[Candidate, ...]  # at least one, by step time
    n_splits: int  # per scheduler
    excluded: tuple[Excluded, ...]


def rank(
    config: Config,
    hardware: Hardware,
    schedulers: Sequence[str],
    workload: Workload,
    rates: Rates,
    check: Callable[[Config], None],
) -> Ranking:
    """Estimate all splits, and rank the fastest ones of each scheduler that pass the check.

    Args:
        check: raises ConfigError if a run would refuse the settings.

    Raises:
        ConfigError: there is no split of this many GPUs, or the check refuses all of them.
    """
    found = list(splits(config, hardware))
    if not found:
        a, worker = config.actor, 0 if hardware.workers_elsewhere else hardware.gpus_per_worker
        problem = (
            f"no split has actor.tp {a.tp} x actor.cp {a.cp} x actor.pp {a.pp} GPUs for the actor (with actor.ep {a.ep}"
            f": {_actor_unit(config)}), rollout.tp {config.rollout.tp} for an engine and {worker} for the teacher, "
            f"on nodes of {hardware.per_node}."
        )
        raise ConfigError("--gpus", hardware.n_gpus, problem, "use more GPUs, or smaller parallel sizes.")
    candidates: list[Candidate] = []
    excluded: dict[tuple[str, str], Excluded] = {}  # (scheduler, key) -> splits
    for scheduler in schedulers:
        every = sorted((candidate(config, s, scheduler, workload, rates) for s in found), key=lambda one: one.order)
        n_passed = 0
        for one in every[:_CHECKED]:
            try:
                check(with_split(config, one.split, scheduler))
            except ConfigError as error:
                before = excluded.get((scheduler, error.key), Excluded(scheduler, 0, error))
                excluded[scheduler, error.key] = replace(before, n=before.n + 1)
                continue
            candidates.append(one)
            n_passed += 1
            if n_passed == _RANKED:
                break
    if not candidates:
        first = next(iter(excluded.values())).first
        problem = f"none of the {len(found)} splits of {hardware.n_gpus} GPUs is possible: {first.problem}"
        raise ConfigError(first.key, first.value, problem, first.fix)
    ranked = tuple(sorted(candidates, key=lambda one: one.order))
    return Ranking(ranked, len(found), tuple(excluded.values()))


def candidate(config: Config, split: Split, scheduler: str, workload: Workload, rates: Rates) -> Candidate:
    """Return a split with its estimated time."""
    bound = replace(config.trainer, scheduler=scheduler).staleness_bound
    return Candidate(scheduler, split, estimate(scheduler, bound, split.sizes(config), workload, rates))


def with_split(config: Config, split: Split, scheduler: str) -> Config:
    """Return the settings of a run with this split and scheduler.

    GPUs and nodes of the measured run do not apply to the planned one: cluster.gpus is empty, and a pool of several
    nodes gets a Ray cluster.
    """
    values = split.settings(scheduler) | {"cluster.gpus": []}
    if max(split.actor.nnodes, split.rollout.nnodes) > 1:
        values["cluster.ray_address"] = config.cluster.ray_address or _SOME_CLUSTER
    if scheduler != STREAM:
        values["trainer.max_staleness"] = TrainerConfig().max_staleness
    return config.with_values(values)


def own_split(config: Config, workers: int, gpus_per_worker: int, *, elsewhere: bool) -> Split:
    """Return the split of a run."""
    actor = PoolSize(config.trainer.nnodes, config.trainer.n_gpus_per_node)
    rollout = PoolSize(config.rollout.nnodes, config.rollout.n_gpus_per_node)
    return Split(actor, rollout, workers, 0 if elsewhere else workers * gpus_per_worker)


def _actor_unit(config: Config) -> int:
    """Return the unit of the actor pool: whole data-parallel groups, with ranks per stage divisible by actor.ep."""
    return config.actor.pp * math.lcm(config.actor.tp * config.actor.cp, config.actor.ep)


def splits(config: Config, hardware: Hardware) -> Iterator[Split]:
    """Yield the splits; the teacher gets the remaining GPUs.

    With a teacher elsewhere, only maximal splits: none has at least as many GPUs as another one in both pools.
    """
    found = _all_splits(config, hardware)
    return _undominated(found) if hardware.workers_elsewhere else found


def _all_splits(config: Config, hardware: Hardware) -> Iterator[Split]:
    a, r = config.actor, config.rollout
    actors = list(_pool_sizes(_actor_unit(config), a.tp, hardware))
    rollouts = list(_pool_sizes(r.tp, r.tp, hardware))
    for actor in actors:
        if actor.n_gpus // a.group_size > config.trainer.global_batch_size:
            continue  # each data-parallel group needs a prompt
        for rollout in rollouts:
            if actor.n_gpus + rollout.n_gpus > hardware.n_gpus:
                break  # sizes ascend
            free = _free(hardware, actor, rollout)
            if free is None:
                continue
            if hardware.workers_elsewhere:
                yield Split(actor, rollout, hardware.workers_elsewhere, 0)
            elif workers := sum(size // hardware.gpus_per_worker * n for size, n in free.items()):
                yield Split(actor, rollout, workers, workers * hardware.gpus_per_worker)


def _undominated(found: Iterable[Split]) -> Iterator[Split]:
    """Yield the splits that no other one dominates: as many GPUs in both pools and more in one."""
    most = 0
    for split in sorted(found, key=lambda s: (-s.actor.n_gpus, -s.rollout.n_gpus)):
        if split.rollout.n_gpus > most:
            most = split.rollout.n_gpus
            yield split


def _pool_sizes(unit: int, tp: int, hardware: Hardware) -> Iterator[PoolSize]:
    """Yield multiples of `unit`, each on as few nodes as possible, without a tensor-parallel group across nodes."""
    for n_gpus in range(unit, hardware.n_gpus + 1, unit):
        if n_gpus <= hardware.per_node:
            yield PoolSize(1, n_gpus)
            continue
        narrowest = hardware.per_node if hardware.n_gpus > _EVERY_SIZE else -(-hardware.per_node // 2)
        for width in range(hardware.per_node, narrowest - 1, -1):
            if n_gpus % width == 0 and width % tp == 0:
                yield PoolSize(n_gpus // width, width)
                break


def _free(hardware: Hardware, actor: PoolSize, rollout: PoolSize) -> Counter[int] | None:
    """Return free GPUs of a node -> number of such nodes; None if the pools do not fit.

    The pool with more GPUs per node is placed first, each time on the node where it leaves fewest GPUs.
    """
    free = Counter(hardware.nodes)
    for pool in sorted((actor, rollout), key=lambda p: -p.per_node):
        n_left = pool.nnodes
        for size in sorted(size for size in free if size >= pool.per_node):
            n = min(n_left, free[size])
            free[size] -= n
            free[size - pool.per_node] += n
            n_left -= n
        if n_left:
            return None
    return free
