"""Compute the memory of every rank of a run from its settings and its models' config.json; sum it by pool and host.

No model is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gkd.config.check_values import Interval, save_interval
from gkd.config.schema import Config
from gkd.config.schema_teacher import ACTOR
from gkd.errors import ModelError
from gkd.hf.model_dims import check_megatron_support, read_dims
from gkd.hf.model_folder import ModelFolder, Tensors, read_model_folder
from gkd.memory.footprint.fsdp import fsdp_footprints, groups
from gkd.memory.footprint.limits import gib
from gkd.memory.footprint.megatron import megatron_footprints
from gkd.memory.footprint.rank import HOST_PARTS, OFFLOADED_STATES, RankFootprint, engine_of, on_host, shared_phases
from gkd.memory.footprint.rollout import rollout_footprint
from gkd.memory.footprint.teacher import with_frozen

# Memory of a process on its GPU before the first tensor: CUDA context, kernels, cuBLAS workspaces, NCCL's buffers. An
# allowance, not measured.
CONTEXT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class RunModels:
    """The model folders of a run's actor and rollout ranks, for estimates with these or changed settings."""

    student: ModelFolder
    local_teacher: ModelFolder | None  # None: a teacher server has it
    reference: ModelFolder | None  # None: there is no frozen reference model

    def footprint(self, config: Config, teacher_hidden: int | None = None) -> tuple[RankFootprint, ...]:
        """Return `footprint` of these models.

        Args:
            teacher_hidden: hidden size of a teacher server's model; that of a local teacher is known.
        """
        local, frozen = self.local_teacher, self.reference
        return footprint(
            config,
            self.student.config_json,
            tensors=self.student.tensors,
            teacher_hidden=teacher_hidden if local is None else local.dims.hidden_size,
            local_teacher=None if local is None else (local.config_json, local.tensors),
            reference=None if frozen is None else (frozen.config_json, frozen.tensors),
        )


# Value of `actor.strategy` -> the function that returns the footprints of its ranks.
_ACTORS = {"megatron": megatron_footprints, "fsdp2": fsdp_footprints}


def read_models(config: Config) -> RunModels:
    """Read the model folders of a run. Raises ConfigError, ModelError as `read_model_folder`."""
    student, derived = read_model_folder(config.model.path, "model.path"), config.derived
    teacher = read_model_folder(config.teacher.path, "teacher.path") if derived.teacher_pool == ACTOR else None
    path = derived.reference_folder
    key = "reference.path" if config.reference.path else "model.path"
    return RunModels(student, teacher, read_model_folder(path, key) if path else None)


def footprint(
    config: Config,
    config_json: Mapping[str, Any],
    *,
    tensors: Tensors | None = None,
    teacher_hidden: int | None = None,
    local_teacher: tuple[Mapping[str, Any], Tensors | None] | None = None,
    reference: tuple[Mapping[str, Any], Tensors | None] | None = None,
) -> tuple[RankFootprint, ...]:
    """Return one footprint per kind of rank: the actor's pipeline stages in their order, then a rollout engine's ranks.

    Args:
        config: trainer.device `auto` counts as cuda.
        config_json: of the student.
        tensors: shapes in the student's files; required if config.json does not determine the parameters (fsdp2 only).
        teacher_hidden: hidden size of the teacher, whose LM head a rank keeps with teacher.signal `hidden`; None: the
            head is left out.
        local_teacher: config.json and tensors of teacher.path, if teacher.backend is local.
        reference: the same for `Derived.reference_folder`, if there is one.

    Raises:
        ModelError: sizes are missing, or actor.strategy=megatron does not support the model.
        ConfigError: the ranks cannot split the model.
    """
    dims, on_cpu = read_dims(config_json), config.trainer.device == "cpu"
    if config.actor.strategy == "megatron":
        check_megatron_support(config_json)
    if not dims.is_exact and tensors is None:
        raise ModelError(
            f"the parameters of model_type {dims.model_type!r} have to be counted in its safetensors files, "
            "and there are none."
        )
    actors = list(_ACTORS[config.actor.strategy](config, dims, tensors, on_cpu=on_cpu, teacher_hidden=teacher_hidden))
    if config.derived.moves_states:
        actors = [replace(part, parts={**part.parts, "moved_states": _moved(part)}) for part in actors]
    if local_teacher is not None:
        actors = [with_frozen(part, "teacher", config, *local_teacher, on_cpu=on_cpu) for part in actors]
    if reference is not None:
        actors = [with_frozen(part, "reference", config, *reference, on_cpu=on_cpu) for part in actors]
    if save_interval(config.trainer.save_every) == Interval() and not config.trainer.keep_best:
        actors = [replace(part, parts={**part.parts, "saved_copy": 0}) for part in actors]  # no save while it trains
    engine = rollout_footprint(config, dims, groups(config, dims, tensors), on_cpu=on_cpu)
    if config.trainer.colocate:  # for a save and an export the engine sleeps, and its weights are kept on the host
        engine = replace(engine, parts={**engine.parts, "moved_states": engine.parts["weights"]})
    found = (*actors, engine)
    return found if on_cpu else tuple(replace(part, parts={**part.parts, "context": CONTEXT_BYTES}) for part in found)


def _moved(part: RankFootprint) -> int:
    """Return the bytes of the states in host memory between two calls; gradients are not kept."""
    return sum(part.parts.get(name, 0) for name in OFFLOADED_STATES if name != "gradients")


# Host memory of a process with its libraries before the first tensor. An allowance: on CUDA not measured.
PROCESS_BYTES = {"cpu": 1 << 30, "cuda": 2 << 30}


@dataclass(frozen=True, slots=True)
class PoolTotal:
    """The GPU memory of a pool, in bytes."""

    pool: str  # "actor" | "rollout" | "actor and rollout" | "teacher"
    n_gpus: int
    largest: int  # on the fullest GPU
    total: int  # on all GPUs


@dataclass(frozen=True, slots=True)
class HostTotal:
    """The host memory of one node, in bytes by part."""

    host: str  # "this host" | "each actor node" | "each rollout node"
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def pool_totals(footprints: Sequence[RankFootprint], gpu_bytes: int | None, config: Config) -> list[PoolTotal]:
    """Return the GPU memory of each pool; none on the CPU. Pools that share their GPUs are one."""
    if config.trainer.device == "cpu":
        return []
    derived, engine = config.derived, engine_of(footprints)
    actors = [part for part in footprints if part.role == "actor"]
    each, found = derived.world_size // len(actors), []  # ranks of a pipeline stage
    if config.trainer.colocate:
        sizes = [max(shared_phases(part, engine, gpu_bytes, config).values()) for part in actors]
        found.append(PoolTotal("actor and rollout", derived.world_size, max(sizes), each * sum(sizes)))
    else:
        sizes = [part.total_bytes for part in actors]
        n_engine = derived.n_engines * config.rollout.tp
        found.append(PoolTotal("actor", derived.world_size, max(sizes), each * sum(sizes)))
        found.append(PoolTotal("rollout", n_engine, engine.total_bytes, n_engine * engine.total_bytes))
    found += [PoolTotal("teacher", 1, p.total_bytes, p.total_bytes) for p in footprints if p.role == "teacher"]
    return found


def host_totals(footprints: Sequence[RankFootprint], scores_bytes: int, config: Config) -> list[HostTotal]:
    """Return the host memory of each kind of node; a single one if all pools are on one host.

    Args:
        footprints: with that of a teacher worker, if its model is known.
        scores_bytes: of the teacher's scores on all nodes together, see `scores_gib`.
    """
    trainer, rollout = config.trainer, config.rollout
    process = PROCESS_BYTES["cpu" if trainer.device == "cpu" else "cuda"]
    actor = Counter({"scores": scores_bytes // trainer.nnodes, "processes": process})  # the driver
    actor += _actor_node(footprints, process, config)
    engines = _node([engine_of(footprints)] * rollout.n_gpus_per_node, process, config)
    if _teacher_is_here(config):
        workers = [part for part in footprints if part.role == "teacher"]
        actor += _node(workers, process, config) + Counter({"processes": process if workers else 2 * process})
    if trainer.colocate or not config.cluster.ray_address:
        return [HostTotal("this host" if trainer.nnodes == 1 else "each node", dict(actor + engines))]
    return [HostTotal("each actor node", dict(actor)), HostTotal("each rollout node", dict(engines))]


def host_shortage(hosts: Sequence[HostTotal], host_bytes: int) -> int:
    """Return the missing bytes of the fullest host; 0 or less if all fit."""
    return max(host.total for host in hosts) - host_bytes


def host_problems(hosts: Sequence[HostTotal], host_bytes: int | None) -> list[str]:
    """Return a line for each host whose memory does not suffice."""
    return [
        f"{host.host} needs {gib(host.total)} of host memory, {gib(host.total - host_bytes)} more than it has"
        for host in hosts
        if host_bytes is not None and host.total > host_bytes
    ]


def _actor_node(footprints: Sequence[RankFootprint], process: int, config: Config) -> Counter[str]:
    """Return the parts of the fullest node; ranks are numbered by node, and pipeline stages are in their order."""
    actors, per_node = [part for part in footprints if part.role == "actor"], config.trainer.n_gpus_per_node
    of_stage = config.derived.world_size // len(actors)
    ranks = [part for part in actors for _ in range(of_stage)]
    nodes = [_node(ranks[i : i + per_node], process, config) for i in range(0, len(ranks), per_node)]
    for stage, size in enumerate(_kept_bytes(actors, engine_of(footprints), config)):
        nodes[stage * of_stage // per_node]["kept_weights"] += size
    return max(nodes, key=lambda parts: parts.total())


def _kept_bytes(actors: Sequence[RankFootprint], engine: RankFootprint, config: Config) -> list[int]:
    """Return what the first rank of each pipeline stage keeps of the last weight sync; see `KeptVersion`.

    All stages together keep what an engine has loaded. With weight_sync.transport: auto, runs on the CPU use shared
    memory.
    """
    shared = ("shared_memory", "auto") if config.trainer.device == "cpu" else ("shared_memory",)
    if not config.rollout.max_restarts and config.weight_sync.transport not in shared:
        return []
    total = config.rollout.tp * engine.parts["weights"]
    weights = [part.parts.get("weights", 1) for part in actors]  # offloaded ones have no entry, and are one stage
    return [total * of_stage // sum(weights) for of_stage in weights]


def _node(ranks: Sequence[RankFootprint], process: int, config: Config) -> Counter[str]:
    found = Counter({"processes": len(ranks) * process})
    for part in ranks:
        found.update({name: part.parts[name] for name in HOST_PARTS if name in part.parts})
        if config.trainer.device == "cpu":
            found[f"{part.role} ranks"] += part.total_bytes
        elif part.role != "teacher" and on_host(config):
            found["weight_sync"] += 2 * (config.weight_sync.bucket_mib << 20)
    return found


def _teacher_is_here(config: Config) -> bool:
    """Return whether there is a teacher server on the trainer's host: its address is a loopback one."""
    derived = config.derived
    addresses = [route.teacher.server_ip for route in derived.routes if route.teacher.backend == "zmq"]
    is_here = any(address == "localhost" or address.startswith("127.") for address in addresses)
    return not derived.teacher_pool and is_here


def scores_gib(config: Config, n_vocab: int, hidden_size: int, n_heldout: int) -> float:
    """Return the peak host memory of the teacher's scores in GiB, for the batches in flight or an evaluation.

    The object store, in shared memory, holds them once, and each tensor-parallel rank that trains on them once more
    (ids in 64 bits).
    """
    bytes_per_logit = 2 if config.teacher.wire == "fp16" else 4  # see `ScoringEndpoint.score`
    logits, hidden, topk = bytes_per_logit * n_vocab, 4 * hidden_size, config.teacher.topk
    stored = {"logits": logits, "hidden": hidden, "topk": 8 * topk, "sampled": 4}
    trained_on = stored | {"topk": 12 * topk}
    signals = config.derived.signals
    held = sum(stored[signal] for signal in signals) + 4 * config.derived.n_student_ids  # those are in the rollouts
    used = config.actor.tp * sum(trained_on[signal] for signal in signals)
    evaluated = min(n_heldout, config.eval.max_prompts or n_heldout) * config.eval.n
    batch = config.trainer.global_batch_size * config.rollout.n
    # Prefetched batches wait in the object store.
    bytes_per_position = max(batch * ((1 + config.trainer.staleness_bound) * held + used), evaluated * (held + used))
    return bytes_per_position * config.data.max_response_length / 2**30
