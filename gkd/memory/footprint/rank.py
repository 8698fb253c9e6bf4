"""The memory of one rank by part and by phase, and of a GPU that an actor rank and an engine share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gkd.config.schema import Config
from gkd.config.schema_rollout import IPC

STATES = ("weights", "gradients", "optimizer")
GENERATE, WEIGHT_SYNC = "generate", "weight_sync"
# Phases of a rank, and the parts that exist only in that phase.
PHASES: dict[str, tuple[str, ...]] = {
    "training_step": ("activations", "logits", "transient"),  # at the peak of a forward and backward pass
    "optimizer_step": ("optimizer_step",),
    WEIGHT_SYNC: (WEIGHT_SYNC,),
    "teacher_pass": ("teacher_pass",),
    "reference_pass": ("reference_pass",),
}
OFFLOADED_STATES = (*STATES, "teacher_head")  # the teacher's LM head moves with the weights
# Parts that are in host memory during a phase, if states are offloaded between calls (`moved_states`).
AWAY = {WEIGHT_SYNC: ("gradients", "optimizer"), "teacher_pass": OFFLOADED_STATES, "reference_pass": OFFLOADED_STATES}
# Parts in host memory, whatever the rank computes on.
HOST_PARTS = ("offloaded", "moved_states", "saved_copy", "teacher_shards", "reference_shards")
OTHER_PROCESSES = "other_processes"  # what processes that are not the run's have of a GPU of the pools
# Parts that are in no sum: a cache for all of an engine's sequences.
UNCOUNTED_PARTS = ("kv_max",)


@dataclass(frozen=True, slots=True)
class RankFootprint:
    """The memory of one rank, in bytes by part. Ranks with equal numbers have one footprint, that of the lowest rank.

    On the device:
        always: `weights`, `gradients`, `optimizer` (moments, and float32 masters of bfloat16 weights), `teacher_head`,
            `teacher_weights` (of a local teacher), `reference_weights`, `kv_cache`, `context`, `other_processes`.
        at the peak of a training step: `activations`, `logits`, `transient` (gradients before they are reduced,
            gathered layers, working memory of the loss).
        in other phases: `optimizer_step`, `weight_sync`, `teacher_pass` (of a local teacher), `reference_pass`.
    In host memory: `HOST_PARTS`. With `moved_states` the states are on the device only in phases that need them.
    In no sum: `kv_max`, the size of a cache that holds all sequences of an engine.
    """

    role: str  # "actor" | "rollout" | "teacher"
    rank: int
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Peak on the rank's device over all phases."""
        return max(self.phases().values())

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device outside of all phases."""
        others = {name for names in (*PHASES.values(), HOST_PARTS, UNCOUNTED_PARTS) for name in names}
        return sum(size for name, size in self.parts.items() if name not in others)

    @property
    def offloaded_resident_bytes(self) -> int:
        """Bytes that stay on the device while the states are in host memory."""
        return self.resident_bytes - self._sum(OFFLOADED_STATES)

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state, which a smaller micro-batch does not reduce."""
        return self._sum(STATES)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory; not a part of `total_bytes`."""
        return self._sum(HOST_PARTS)

    def phases(self) -> dict[str, int]:
        """Return the bytes on the device in each phase that this rank has."""
        found = {}
        for phase, names in PHASES.items():
            if phase == "training_step" or any(name in self.parts for name in names):
                away = self._sum(AWAY.get(phase, ())) if "moved_states" in self.parts else 0
                found[phase] = self.resident_bytes - away + self._sum(names)
        return found

    def _sum(self, names: Sequence[str]) -> int:
        return sum(self.parts.get(name, 0) for name in names)


Refit = Callable[[Config], Sequence[RankFootprint]]  # the footprints of changed settings, as `footprint` returns them


def sync_buffers(config: Config, largest: int, total: int) -> int:
    """Return the bytes of the buckets that exist at a time in a weight sync.

    Two, while one is sent or loaded. Where gloo sends them from host memory, one is an allowance.

    Args:
        largest: bytes of the largest tensor; it has a bucket of its own.
        total: bytes of all tensors of the rank's pipeline stage.
    """
    one = max(min(config.weight_sync.bucket_mib << 20, total), largest)
    return one if on_host(config) else min(2 * one, total)


def on_host(config: Config) -> bool:
    """Return whether the weights of a run on GPUs travel through host memory."""
    return config.trainer.colocate and config.transport("cuda") != IPC


def shared_phases(actor: RankFootprint, engine: RankFootprint, gpu_bytes: int | None, config: Config) -> dict[str, int]:
    """Return the bytes of actor and engine together on one GPU (`trainer.colocate`), by phase.

        generate                          the engine's share          | the actor without its states
        training_step, teacher_pass, ...  the actor                   | the sleeping engine
        weight_sync                       the actor's weights, bucket | the engine's weights, bucket

    Args:
        gpu_bytes: memory of the GPU, of which an engine takes its share; None, or the size of its KV cache is given:
            the engine's own total.
    """
    share = engine.total_bytes
    if gpu_bytes and not config.rollout.kv_cache_mib:
        share = round(gpu_bytes * config.rollout.gpu_memory_utilization)
    asleep = engine.parts.get("context", 0)  # neither the CUDA context nor NCCL's buffers are released
    found = {GENERATE: share + actor.offloaded_resident_bytes}
    for phase, size in actor.phases().items():
        in_engine = engine.parts.get("weights", 0) + engine.parts.get(WEIGHT_SYNC, 0) if phase == WEIGHT_SYNC else 0
        found[phase] = size + in_engine + asleep
    return found


def shared_phases_by_rank(
    footprints: Sequence[RankFootprint], gpu_bytes: int | None, config: Config
) -> dict[int, dict[str, int]]:
    """Return `shared_phases` of each kind of actor rank; empty without `trainer.colocate`."""
    if not config.trainer.colocate:
        return {}
    engine = engine_of(footprints)
    return {part.rank: shared_phases(part, engine, gpu_bytes, config) for part in footprints if part.role == "actor"}


def other_processes_bytes(config: Config, gpu_bytes: int | None, in_use: int = 0) -> int:
    """Return what other processes have of each GPU of the pools: what they use now, or will as the settings state.

    Args:
        gpu_bytes: memory of the GPU; None: unknown.
        in_use: bytes that they have before the pools start.
    """
    return max(in_use, round((gpu_bytes or 0) * config.cluster.teacher_gpu_share))


def with_other_processes(footprints: Sequence[RankFootprint], n_bytes: int, config: Config) -> list[RankFootprint]:
    """Return the footprints of a run with the memory that other processes have of each GPU of the pools.

    Args:
        n_bytes: of a teacher server, for example; on a GPU that an actor rank and an engine share they count once.
    """
    roles = ("actor",) if config.trainer.colocate else ("actor", "rollout")
    if not n_bytes or config.trainer.device == "cpu":
        return list(footprints)
    return [
        replace(part, parts={**part.parts, OTHER_PROCESSES: n_bytes}) if part.role in roles else part
        for part in footprints
    ]


def engine_of(footprints: Sequence[RankFootprint]) -> RankFootprint:
    """Return the rollout engine's footprint among those of a run."""
    (engine,) = (part for part in footprints if part.role == "rollout")
    return engine
