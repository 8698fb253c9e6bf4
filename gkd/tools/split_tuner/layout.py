"""Enumerate the splits of the GPUs into three pools that the config keys and Ray's packing allow."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gkd.config.derived import derive
from gkd.config.schema import Config, TrainerConfig
from gkd.config.schema_trainer import STREAM
from gkd.tools.split_tuner.rates import Sizes

# With more GPUs than this, a pool that is larger than a node consists of whole nodes.
_EVERY_SIZE = 64
# Stands for the address of the planned run's Ray cluster. It is never printed or contacted.
_SOME_CLUSTER = "planned:6379"


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
    workers: int  # of the teacher
    teacher_gpus: int  # of the GPUs to split; 0: the teacher has others


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs to split."""

    n_gpus: int
    per_node: int  # GPUs of a node; the last one may have fewer
    gpus_per_worker: int  # of the teacher
    workers_elsewhere: int  # of a teacher with other GPUs; 0: it takes some of these

    @property
    def nodes(self) -> list[int]:
        """GPUs of each node."""
        whole, rest = divmod(self.n_gpus, self.per_node)
        return [self.per_node] * whole + [rest] * (rest > 0)


def with_split(config: Config, split: Split, scheduler: str) -> Config:
    """Return the settings of a run with this split and scheduler.

    GPUs and nodes of the measured run do not apply to the planned one: cluster.gpus is empty, and a pool of several
    nodes gets a Ray cluster.
    """
    changed = copy.deepcopy(config)
    changed.trainer.nnodes, changed.trainer.n_gpus_per_node = split.actor.nnodes, split.actor.per_node
    changed.rollout.nnodes, changed.rollout.n_gpus_per_node = split.rollout.nnodes, split.rollout.per_node
    changed.trainer.scheduler = scheduler
    changed.cluster.gpus = []
    if max(split.actor.nnodes, split.rollout.nnodes) > 1:
        changed.cluster.ray_address = changed.cluster.ray_address or _SOME_CLUSTER
    if scheduler != STREAM:
        changed.trainer.max_staleness = TrainerConfig().max_staleness
    return changed


def own_split(config: Config, workers: int, gpus_per_worker: int, *, elsewhere: bool) -> Split:
    """Return the split of a run."""
    actor = PoolSize(config.trainer.nnodes, config.trainer.n_gpus_per_node)
    rollout = PoolSize(config.rollout.nnodes, config.rollout.n_gpus_per_node)
    return Split(actor, rollout, workers, 0 if elsewhere else workers * gpus_per_worker)


def sizes(config: Config, split: Split) -> Sizes:
    """Return the sizes of a split that `config` already has."""
    derived = derive(config)
    return Sizes(derived.dp_size, derived.n_engines, split.workers)


def actor_unit(config: Config) -> int:
    """Return the unit of the actor pool: whole data-parallel groups, with ranks per stage divisible by actor.ep."""
    return config.actor.pp * math.lcm(config.actor.tp, config.actor.ep)


def splits(config: Config, hardware: Hardware) -> Iterator[Split]:
    """Yield the splits; the teacher gets the remaining GPUs.

    With a teacher elsewhere, only maximal splits: none has at least as many GPUs as another one in both pools.
    """
    found = _all_splits(config, hardware)
    return _undominated(found) if hardware.workers_elsewhere else found


def _all_splits(config: Config, hardware: Hardware) -> Iterator[Split]:
    a, r = config.actor, config.rollout
    actors = list(_pool_sizes(actor_unit(config), a.tp, hardware))
    rollouts = list(_pool_sizes(r.tp, r.tp, hardware))
    for actor in actors:
        if actor.n_gpus // (a.tp * a.pp) > config.trainer.global_batch_size:
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
    """Return free GPUs of a node -> number of such nodes; None: the pools do not fit.

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
