"""Compare footprints with the memory of a GPU: what does not fit, and how much is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gkd.config.schema import Config
from gkd.memory.footprint.rank import OTHER_PROCESSES, RankFootprint, engine_of, shared_phases
from gkd.memory.footprint.rollout import kv_max, kv_room_bytes, max_sequences

GIB = 1 << 30
_FIXES_OF_TEACHER = {"share": " Fix: state a larger share.", "all": " Fix: more GPUs for each teacher worker."}


def allowed_bytes(gpu_bytes: int, config: Config) -> int:
    """Return what memory.margin leaves of a GPU, for fragmentation and what no estimate counts."""
    return round(gpu_bytes * (1 - config.memory.margin))


def check(footprints: Sequence[RankFootprint], gpu_bytes: int, config: Config) -> list[str]:
    """Return one line for each problem; empty if everything fits with memory.margin.

    `gkd.memory.footprint.combination` finds what to change.

    Args:
        footprints: of `footprint`, and of `teacher_footprint` to check the teacher, too.
        gpu_bytes: memory of one GPU; every rank has one, which it may share with an engine.
    """
    problems = []
    case = _Case(footprints, gpu_bytes, config)
    for part in footprints:
        for need, lack in _missing(part, case).items():
            if lack > 0:
                fix = _FIXES_OF_TEACHER[need] if part.role == "teacher" else ""
                problems.append(f"{_sentence(part, need, lack, case)}.{fix}")
    return problems


def shortages(footprints: Sequence[RankFootprint], gpu_bytes: int, config: Config) -> dict[tuple[str, str], int]:
    """Return the missing bytes of the neediest rank by (role, need), memory.margin included; 0 or less: enough.

    The needs of an actor are the phases of its GPU, those of an engine as in `_missing`.
    """
    case, found = _Case(footprints, gpu_bytes, config), dict[tuple[str, str], int]()
    for part in footprints:
        needs = _missing(part, case)
        if part.role == "actor":
            needs = {phase: size - case.allowed for phase, size in _phases(part, case).items()}
        for need, lack in needs.items():
            found[part.role, need] = max(lack, found.get((part.role, need), lack))
    return found


def actor_peak(footprints: Sequence[RankFootprint], gpu_bytes: int, config: Config) -> int:
    """Return the bytes on the fullest GPU of the actor, with its engine if they share it."""
    case = _Case(footprints, gpu_bytes, config)
    return max(max(_phases(part, case).values()) for part in footprints if part.role == "actor")


def smallest_margin(footprints: Sequence[RankFootprint], gpu_bytes: int, config: Config) -> tuple[str, float]:
    """Return (rank, free share of its GPU) of the fullest rank.

    Ranks that take a fixed share of a GPU do not count: an engine, and a teacher on the pools' GPUs.
    """
    case = _Case(footprints, gpu_bytes, config)
    lacks = {
        f"{part.role} rank {part.rank}": needs["all"] if "all" in needs else max(needs.values())
        for part in footprints
        if "all" in (needs := _missing(part, case)) or part.role == "actor"
    }
    free = {name: (gpu_bytes - case.allowed - lack) / gpu_bytes for name, lack in lacks.items()}
    return min(free.items(), key=lambda item: item[1])


def state_fits(part: RankFootprint, gpu_bytes: int) -> bool:
    """Return whether weights, gradients and optimizer state alone fit. If not, a smaller micro-batch does not help."""
    return part.state_bytes <= gpu_bytes


def gib(n_bytes: float) -> str:
    """Return a size such as "1.50 GiB"."""
    return f"{n_bytes / GIB:.2f} GiB"


@dataclass(frozen=True, slots=True)
class _Case:
    footprints: Sequence[RankFootprint]  # one for each rank
    gpu_bytes: int
    config: Config

    @property
    def allowed(self) -> int:
        return allowed_bytes(self.gpu_bytes, self.config)

    @property
    def is_shared(self) -> bool:
        """True if an actor rank and an engine share one GPU."""
        return self.config.trainer.colocate and self.config.trainer.device != "cpu"


def _phases(part: RankFootprint, case: _Case) -> dict[str, int]:
    """Return the bytes on the GPU of an actor rank by phase, with its engine if they share it."""
    if case.is_shared:
        return shared_phases(part, engine_of(case.footprints), case.gpu_bytes, case.config)
    return part.phases()


def _missing(part: RankFootprint, case: _Case) -> dict[str, int]:
    """Return the missing bytes for each need of a rank; 0 or less if there is enough.

    On CUDA an engine takes its share of the GPU, whatever it needs, and needs no margin. vLLM does not start without
    room in its cache for one sequence of full length, and the share must leave room for a weight sync and other
    processes. An engine whose KV cache has a given size must fit as any rank. On a shared GPU each phase must fit.
    """
    gpu_bytes, config = case.gpu_bytes, case.config
    if case.is_shared and part.role == "actor":
        return {phase: size - case.allowed for phase, size in _phases(part, case).items()}
    if part.role == "teacher" and config.cluster.teacher_gpu_share:
        return {"share": part.total_bytes - round(gpu_bytes * config.cluster.teacher_gpu_share)}
    if part.role != "rollout" or config.trainer.device == "cpu":
        return {"all": part.total_bytes - case.allowed}
    sequence = kv_max(part) // max_sequences(config) - kv_room_bytes(part, gpu_bytes, config)
    if case.is_shared:
        return {"sequence": sequence}
    if config.rollout.kv_cache_mib:
        return {"sequence": sequence, "all": part.total_bytes - case.allowed}
    left = round(gpu_bytes * (1 - config.rollout.gpu_memory_utilization)) - part.parts.get(OTHER_PROCESSES, 0)
    sync = part.parts["weight_sync"] - left
    return {"sequence": sequence, "sync": sync}


def _sentence(part: RankFootprint, need: str, lack: int, case: _Case) -> str:
    gpu_bytes, config = case.gpu_bytes, case.config
    name = f"{part.role} rank {part.rank}"
    if need == "sequence":
        longest = config.derived.max_engine_length
        return f"{name}: the KV cache of one sequence of {longest} tokens needs {gib(lack)} more"
    if need == "sync":
        share, bucket = config.rollout.gpu_memory_utilization, gib(part.parts["weight_sync"])
        others = part.parts.get(OTHER_PROCESSES, 0)
        beside = f", {bucket}, and other processes, {gib(others)}" if others else f", {bucket}"
        return f"{name}: rollout.gpu_memory_utilization {share} leaves {gib(lack)} too little for two buckets{beside}"
    if need == "share":
        of_teacher = f"cluster.teacher_gpu_share ({config.cluster.teacher_gpu_share:g})"
        return f"{name} needs {gib(part.total_bytes)}, {gib(lack)} more than {of_teacher} of a GPU"
    limit = f"the GPU's {gib(gpu_bytes)} less memory.margin ({config.memory.margin:g} of it)"
    if need == "all":
        return f"{name} needs {gib(part.total_bytes)}, {gib(lack)} more than {limit}"
    return f"{name} and its engine need {gib(lack + case.allowed)} ({need}), {gib(lack)} more than {limit}"
