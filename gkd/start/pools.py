"""The resource pools of a run, and the environment variables of their processes.

    actor     trainer.nnodes x trainer.n_gpus_per_node processes, a GPU each
    rollout   rollout.nnodes x rollout.n_gpus_per_node / rollout.tp engines, rollout.tp GPUs each; with
              trainer.colocate they share the actor's GPUs

`actor` trains the student, `rollout` generates with its weights. `gkd.cluster` reserves both in Ray.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from gkd.cluster.cluster import HELPER_CPUS, Cluster
from gkd.cluster.placement import PoolSpec
from gkd.cluster.pool import Pool, colocated_pool
from gkd.config.schema import Config
from gkd.config.schema_teacher import ACTOR, ROLLOUT
from gkd.data.chunks import CHUNK_SIZE
from gkd.rollout.vllm.start import CPU_ENV
from teacher_server.wire.machine import thread_env


def pool_specs(config: Config) -> tuple[PoolSpec, PoolSpec]:
    """Return the specs of (actor, rollout): one process per GPU, and one per engine."""
    t = config.trainer
    r = config.rollout
    return (
        PoolSpec(ACTOR, t.nnodes, t.n_gpus_per_node, gpus_per_worker=1, helper_cpus=HELPER_CPUS),
        PoolSpec(ROLLOUT, r.nnodes, r.n_gpus_per_node // r.tp, gpus_per_worker=r.tp, unit="engine"),
    )


def pools_in_order(config: Config) -> list[PoolSpec]:
    """Return the pools with GPUs of their own. The actor's comes first, so it gets the lowest ids and first nodes."""
    actor, rollout = pool_specs(config)
    if config.trainer.colocate:
        return [replace(actor, helper_cpus=actor.helper_cpus + 1.0)]  # each rank shares its slot with an engine
    return [actor, rollout]


def make_cluster(config: Config, *, on_cpu: bool, pools: Sequence[PoolSpec] = ()) -> Cluster:
    """Start or join Ray, with GPUs or slots for these pools, by default all. Raises ClusterError: it cannot."""
    specs = pools or pools_in_order(config)
    return Cluster(
        config.cluster.ray_address,
        n_slots=sum(spec.n_gpus for spec in specs),
        on_cpu=on_cpu,
        gpus=config.cluster.gpus,
        cpus_a_slot=1.0 + max(HELPER_CPUS, *(spec.helper_cpus for spec in specs)),
    )


def make_pools(cluster: Cluster, config: Config, timeout_s: float) -> dict[str, Pool]:
    """Reserve the pools and return them by name. Raises as `Cluster.make_pools` and `colocated_pool`."""
    pools = cluster.make_pools(pools_in_order(config), timeout_s)
    if config.trainer.colocate:
        pools[ROLLOUT] = colocated_pool(pools[ACTOR], pool_specs(config)[1], timeout_s)
    return pools


def inline_bytes(n_sequences: int) -> int:
    """Return the size below which Ray returns a result to the caller, the driver.

    Larger results stay in the object store of the worker's host. With Ray's default of 100 kB chunks of rollouts and
    scores would travel through the driver, twice, since it also sends them on as arguments. What the driver reads of a
    full chunk of `n_sequences` is smaller than this limit.
    """
    return 640 + 32 * n_sequences  # the most that a chunk's sizes, or the summary of its scores, may have


def cpu_threads(config: Config) -> tuple[int, int]:
    """Return the CPU threads of an actor rank and of an engine's rank.

    Where actor and engines take turns, each has all cores. Where they overlap, they share them.
    """
    trainer = config.trainer
    rollout = config.rollout
    n_cores = trainer.cpu_cores or len(os.sched_getaffinity(0))
    n_cores = n_cores if trainer.scheduler == "sync" else n_cores // 2
    return max(1, n_cores // trainer.n_gpus_per_node), max(1, n_cores // rollout.n_gpus_per_node)


def worker_env(on_cpu: bool, n_sequences: int = CHUNK_SIZE, *, n_threads: int = 1) -> dict[str, str]:
    """Return the environment of the workers: bulk results stay off the driver, libraries log little (unless the user
    sets otherwise), and on CPU each has its threads.

    Args:
        n_sequences: of a full chunk.
        n_threads: of a worker on the CPU.
    """
    env = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
    env = {key: os.environ.get(key, value) for key, value in env.items()}
    env["TOKENIZERS_PARALLELISM"] = "false"
    env["RAY_max_direct_call_object_size"] = str(inline_bytes(n_sequences))
    if on_cpu:
        return env | CPU_ENV | thread_env(n_threads)
    # So that ids in CUDA_VISIBLE_DEVICES mean the same GPUs as in nvidia-smi, Ray and the teacher.
    return env | {"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}


def actor_env(config: Config, on_cpu: bool) -> dict[str, str]:
    """Return what the actor's ranks have in addition.

    With one hardware queue, a collective starts before the product that is launched after it, so that tensor-parallel
    ranks communicate while they compute. On CPU vLLM's environment disables torch.compile.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if on_cpu:
        return {"TORCHDYNAMO_DISABLE": "0"} if config.actor.compile == "on" else {}
    return {} if config.actor.tp == 1 else {name: os.environ.get(name, "1")}
