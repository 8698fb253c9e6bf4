"""Check sizes against each other: pools, parallel layout, nodes, batches, timeouts."""

from __future__ import annotations

from gkd.config.schema import ENGINE_RANKS, Config
from gkd.config.schema_actor import BACKENDS
from gkd.config.schema_teacher import ACTOR
from gkd.errors import ConfigError


def check_strategy(config: Config) -> None:
    """Check that the student's backend supports the settings."""
    a = config.actor
    if a.attention != "auto" and config.model.dtype == "float32":
        problem = "FlashAttention computes in 16 bits, and model.dtype is float32."
        raise config.error("actor.attention", problem, "use auto, or model.dtype=bfloat16.")
    for name, limit in a.backend.limits.items():
        value = getattr(a, name)
        if value not in limit.values:
            other = next(other for other, backend in BACKENDS.items() if backend.supports(name, value))
            fix = f"use {' or '.join(map(str, limit.values))}, or actor.strategy={other}."
            raise config.error(f"actor.{name}", f"actor.strategy={a.strategy} {limit.why}.", fix)
    if a.layers == "te" and a.lora.rank:
        problem = "Transformer Engine's matrices include the preceding norm, so adapters would not get their input."
        raise config.error("actor.layers", problem, "use auto, or actor.lora.rank=0.")


def check_pools(config: Config) -> None:
    """Check that the parallel layout divides the pools."""
    t, a, r = config.trainer, config.actor, config.rollout
    world = config.derived.world_size
    if world % (a.tp * a.pp):
        problem = (
            f"the actor pool has {t.n_gpus_per_node} x trainer.nnodes {t.nnodes} = {world} ranks, which "
            f"actor.tp {a.tp} x actor.pp {a.pp} = {a.tp * a.pp} does not divide."
        )
        raise config.error("trainer.n_gpus_per_node", problem, "make the pool a multiple of actor.tp x actor.pp.")
    if a.vpp > 1 and a.pp == 1:
        problem = "with actor.pp 1 there is no pipeline to interleave."
        raise config.error("actor.vpp", problem, "use 1, or actor.pp > 1.")
    if a.sequence_parallel and a.tp == 1:
        problem = "with actor.tp 1 there are no ranks to split the sequence over."
        raise config.error("actor.sequence_parallel", problem, "use false, or actor.tp > 1.")
    if t.n_gpus_per_node % a.tp and t.nnodes > 1:
        problem = f"a tensor-parallel group would span nodes of trainer.n_gpus_per_node {t.n_gpus_per_node} GPUs."
        raise config.error("actor.tp", problem, "let actor.tp divide trainer.n_gpus_per_node.")
    if r.n_gpus_per_node % r.tp:
        problem = f"rollout.n_gpus_per_node {r.n_gpus_per_node} is not a multiple of it."
        fix = "let rollout.tp divide rollout.n_gpus_per_node; an engine never spans nodes."
        raise config.error("rollout.tp", problem, fix)


def check_cluster(config: Config) -> None:
    """Check nodes and GPUs."""
    t, r, c = config.trainer, config.rollout, config.cluster
    _check_sharing(config)
    if "://" in c.ray_address:
        problem = "Ray Client is not supported: the trainer must run on a node of the cluster."
        raise config.error("cluster.ray_address", problem, "give the HOST:PORT that ray start --head prints.")
    if not c.ray_address:
        for key, nnodes in (("trainer.nnodes", t.nnodes), ("rollout.nnodes", r.nnodes)):
            if nnodes > 1:
                problem = "without cluster.ray_address there is only this node."
                raise ConfigError(key, nnodes, problem, "use 1, or name a Ray cluster in cluster.ray_address.")
    if not c.gpus:
        return
    if min(c.gpus) < 0 or len(set(c.gpus)) < len(c.gpus):
        raise config.error("cluster.gpus", "must be distinct numbers >= 0.", "write e.g. [0, 1, 2, 3].")
    # A node may hold only one of the pools if there are several nodes.
    both, most = t.n_gpus_per_node + r.n_gpus_per_node, max(t.n_gpus_per_node, r.n_gpus_per_node)
    n_wanted = most if c.ray_address or t.colocate else both
    if len(c.gpus) < n_wanted:
        problem = (
            f"with trainer.n_gpus_per_node {t.n_gpus_per_node} and rollout.n_gpus_per_node {r.n_gpus_per_node} a node "
            f"needs {n_wanted}."
        )
        raise config.error("cluster.gpus", problem, "name more GPUs, or use smaller pools.")


def _check_sharing(config: Config) -> None:
    """Check that pools which share GPUs have equal sizes and never work at the same time."""
    t, r = config.trainer, config.rollout
    moving = "trainer.colocate" if t.colocate else "actor.offload_train" if config.actor.offload_train else ""
    if config.memory.strategy == "resident" and moving:
        problem = f"with {moving} the actor's states move between calls."
        raise config.error("memory.strategy", problem, f"use auto, or {moving}=false.")
    share, taken = config.cluster.teacher_gpu_share, r.gpu_memory_utilization
    if share and config.derived.teacher_pool:
        problem = f"teacher.backend={config.teacher.backend} has no server."
        raise config.error("cluster.teacher_gpu_share", problem, "remove it, or use teacher.backend=zmq.")
    if share + taken > 1 and not r.kv_cache_mib:
        problem = f"cluster.teacher_gpu_share {share:g} of the same GPUs is the teacher's: together more than 1."
        raise config.error("rollout.gpu_memory_utilization", problem, f"use at most {1 - share:g}.")
    if not t.colocate:
        return
    for name, own, other in (("n_gpus_per_node", r.n_gpus_per_node, t.n_gpus_per_node), ("nnodes", r.nnodes, t.nnodes)):
        if own != other:
            problem = f"with trainer.colocate the engines are on the actor's GPUs, and trainer.{name} is {other}."
            raise config.error(f"rollout.{name}", problem, f"use {other}, or trainer.colocate=false.")
    if t.scheduler != "sync":
        problem = "with trainer.colocate actor and engines alternate, and this scheduler overlaps them."
        raise config.error("trainer.scheduler", problem, "use sync, or trainer.colocate=false.")
    if config.derived.teacher_pool == ACTOR and not config.teacher.fsdp_cpu_offload:
        problem = "with trainer.colocate the engines need the whole GPUs, and the teacher's shards would stay there."
        raise config.error("teacher.fsdp_cpu_offload", problem, "use true, or trainer.colocate=false.")
    if config.derived.reference_folder and not config.reference.fsdp_cpu_offload:
        problem = "with trainer.colocate the engines need the whole GPUs, and the reference's shards would stay there."
        raise config.error("reference.fsdp_cpu_offload", problem, "use true, or trainer.colocate=false.")
    if config.weight_sync.transport == "nccl":
        problem = "with trainer.colocate two ranks of a group are on one GPU, which NCCL does not support."
        raise config.error("weight_sync.transport", problem, "use auto, or trainer.colocate=false.")


def check_adapter_sync(config: Config) -> None:
    """Check that there are adapters to send, and that engines can hold them."""
    rank = config.actor.lora.rank
    if config.weight_sync.lora != "adapters" or config.derived.engine_adapter_rank:
        return
    if not rank:
        problem = "actor.lora.rank is 0, so there are no adapters."
        raise config.error("weight_sync.lora", problem, "use merged, or set actor.lora.rank.")
    problem = f"vLLM supports adapters up to rank {ENGINE_RANKS[-1]}, and actor.lora.rank is {rank}."
    raise config.error("weight_sync.lora", problem, "use merged, or a lower actor.lora.rank.")


def check_sizes(config: Config) -> None:
    """Check batch sizes, the learning rate schedule and timeouts."""
    t = config.trainer
    dp = config.derived.dp_size
    if t.global_batch_size < dp:
        problem = f"each of the actor's {dp} data-parallel groups needs a prompt."
        raise config.error("trainer.global_batch_size", problem, f"use at least {dp}, or a larger actor.tp / actor.pp.")
    _check_schedule(config)
    longest = config.derived.max_sequence_length
    budget = config.actor.max_tokens_per_micro_batch
    if 0 < budget < longest:
        problem = f"one sequence may have data.max_prompt_length + data.max_response_length = {longest} tokens."
        raise config.error("actor.max_tokens_per_micro_batch", problem, f"use 0 or at least {longest}.")
    patience = config.teacher.outage_budget_s + config.teacher.request_timeout_s
    if not config.derived.teacher_pool and t.stage_timeout_s <= patience:
        problem = (
            f"a teacher outage may last teacher.outage_budget_s + teacher.request_timeout_s = {patience:g} s, and the "
            "stage would time out first, without a checkpoint."
        )
        raise config.error("trainer.stage_timeout_s", problem, f"use more than {patience:g}.")
    n_nodes = max(t.nnodes, config.rollout.nnodes)
    if config.weight_sync.transport == "shared_memory" and n_nodes > 1:
        problem = f"it needs all members on one host, and there are {n_nodes} nodes."
        raise config.error("weight_sync.transport", problem, "use auto.")
    transport = config.weight_sync.transport
    if transport in ("nccl", "ipc") and t.device == "cpu":
        raise config.error("weight_sync.transport", "it needs GPUs, and trainer.device is cpu.", "use auto.")
    if transport == "ipc" and not t.colocate:
        problem = "it needs actor and engine on the same card, and trainer.colocate is false."
        raise config.error("weight_sync.transport", problem, "use auto.")
    if transport == "ipc" and config.actor.pp > 1:
        problem = f"each card must hold tensors of all layers, and actor.pp is {config.actor.pp}."
        raise config.error("weight_sync.transport", problem, "use auto, or actor.pp=1.")


def _check_schedule(config: Config) -> None:
    """Check the decay steps against total_steps; `OptimSpec` checks them against the number of steps of the data."""
    o, total_steps = config.actor.optim, config.trainer.total_steps
    if o.schedule != "wsd":
        return
    if not o.decay_steps:
        raise config.error("actor.optim.decay_steps", "the schedule wsd needs decay steps.", "use at least 1.")
    if 0 < total_steps < o.warmup_steps + o.decay_steps:
        problem = f"with actor.optim.warmup_steps {o.warmup_steps} they exceed trainer.total_steps {total_steps}."
        raise config.error("actor.optim.decay_steps", problem, "reduce one of them.")
