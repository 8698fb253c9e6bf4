"""Compare footprints with the memory of a GPU: what does not fit, and which changes of settings help by how much.

A fix is tried before it is named: a changed copy of the settings has to pass `check_config`, and its footprint has to
be smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

from gkd.config.check import check_config
from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.errors import ConfigError, ModelError
from gkd.footprint.rank import GENERATE, RankFootprint, engine_of, shared_phases
from gkd.footprint.rollout import kv_max, kv_room_bytes, max_sequences
from gkd.memory.remedies import ACTOR_REMEDIES, ENGINE_REMEDIES, ENGINE_TP
from gkd.memory.remedy import Changes, as_yaml

GIB = 1 << 30
_MAX_UTILIZATION = 0.95  # that is recommended

Refit = Callable[[Config], Sequence[RankFootprint]]  # the footprints of changed settings, as `footprint` returns them


def check(footprints: Sequence[RankFootprint], gpu_bytes: int, config: Config, refit: Refit | None = None) -> list[str]:
    """Return one line for each problem, with its fixes; empty if everything fits.

    Args:
        footprints: of `footprint`, and of `teacher_footprint` to check the teacher, too.
        gpu_bytes: memory of one GPU; every rank has one, which it may share with an engine.
        refit: None: look for no fixes.

    Raises:
        ValueError: gpu_bytes is not positive.
    """
    if gpu_bytes <= 0:
        raise ValueError(f"gpu_bytes = {gpu_bytes} is not positive")
    problems = []
    case = _Case(footprints, gpu_bytes, config)
    for part in footprints:
        for need, lack in _missing(part, case).items():
            if lack <= 0:
                continue
            fixes = ["more GPUs for each teacher worker"] if part.role == "teacher" else []
            if refit is not None and part.role != "teacher":
                index = [other for other in footprints if other.role == part.role].index(part)
                fixes = list(_fixes(part, index, need, case, refit)) or ["a larger GPU"]
            fix = f" Fix: {'; '.join(fixes)}." if fixes else ""
            problems.append(f"{_sentence(part, need, lack, case)}.{fix}")
    return problems


def smallest_margin(footprints: Sequence[RankFootprint], gpu_bytes: int, config: Config) -> tuple[str, float]:
    """Return (rank, free share of its GPU) of the fullest rank.

    An engine with a GPU of its own takes a fixed share of it, and so does not count.
    """
    case = _Case(footprints, gpu_bytes, config)
    free = {
        f"{part.role} rank {part.rank}": min(-lack for lack in _missing(part, case).values()) / gpu_bytes
        for part in footprints
        if part.role != "rollout" or config.trainer.device == "cpu"
    }
    return min(free.items(), key=lambda item: item[1])


def state_fits(part: RankFootprint, gpu_bytes: int) -> bool:
    """Return whether weights, gradients and optimizer state alone fit. If not, a smaller micro-batch does not help."""
    return part.state_bytes <= gpu_bytes


def gib(n_bytes: float) -> str:
    """Return a size such as "1.50 GiB"."""
    return f"{n_bytes / GIB:.2f} GiB"


@dataclass(frozen=True, slots=True)
class _Case:
    footprints: Sequence[RankFootprint]  # of all ranks
    gpu_bytes: int
    config: Config

    @property
    def is_shared(self) -> bool:
        """True if an actor rank and an engine share one GPU."""
        return self.config.trainer.colocate and self.config.trainer.device != "cpu"


def _missing(part: RankFootprint, case: _Case) -> dict[str, int]:
    """Return the missing bytes for each need of a rank; 0 or less if there is enough.

    On CUDA an engine takes its share of the GPU, whatever it needs. vLLM does not start without room in its cache for
    one sequence of full length, and the share must leave room for a weight sync. On a shared GPU each phase must fit.
    """
    gpu_bytes, config = case.gpu_bytes, case.config
    if case.is_shared and part.role == "actor":
        phases = shared_phases(part, engine_of(case.footprints), gpu_bytes, config)
        return {phase: size - gpu_bytes for phase, size in phases.items()}
    if part.role != "rollout" or config.trainer.device == "cpu":
        return {"all": part.total_bytes - gpu_bytes}
    sequence = kv_max(part) // max_sequences(config) - kv_room_bytes(part, gpu_bytes, config)
    if case.is_shared:
        return {"sequence": sequence}
    sync = part.parts["weight_sync"] - round(gpu_bytes * (1 - config.rollout.gpu_memory_utilization))
    return {"sequence": sequence, "sync": sync}


def _sentence(part: RankFootprint, need: str, lack: int, case: _Case) -> str:
    gpu_bytes, config = case.gpu_bytes, case.config
    name = f"{part.role} rank {part.rank}"
    if need == "sequence":
        longest = derive(config).max_sequence_length
        return f"{name}: the KV cache of one sequence of {longest} tokens needs {gib(lack)} more"
    if need == "sync":
        share, bucket = config.rollout.gpu_memory_utilization, gib(part.parts["weight_sync"])
        return f"{name}: rollout.gpu_memory_utilization {share} leaves {gib(lack)} too little for a bucket of {bucket}"
    if need == "all":
        return f"{name} needs {gib(part.total_bytes)}, {gib(lack)} more than the GPU's {gib(gpu_bytes)}"
    both = gib(lack + gpu_bytes)
    return f"{name} and its engine need {both} ({need}), {gib(lack)} more than the GPU's {gib(gpu_bytes)}"


def _fixes(part: RankFootprint, index: int, need: str, case: _Case, refit: Refit) -> Iterator[str]:
    """Yield the changes that help, largest saving first. A change that worsens another shortage of the rank is dropped.

    Args:
        index: of the rank among those of its role.
        need: that is not met, see `_missing`.
    """
    missing, config = _missing(part, case), case.config
    tried = _actor_changes(part, need, case) if part.role == "actor" else _rollout_changes(part, case)
    savings = []
    for changes in filter(None, tried):
        changed = deepcopy(config)
        for key, value in changes.items():
            section, _, name = key.partition(".")
            setattr(getattr(changed, section), name, value)
        try:
            check_config(changed)
            all_then = refit(changed)
            then = [other for other in all_then if other.role == part.role][index]
        except (ConfigError, ModelError):
            continue  # this model or these pools do not allow it
        left = _missing(then, _Case(all_then, case.gpu_bytes, changed))
        saved = missing[need] - left.get(need, missing[need])
        if saved > 0 and all(left.get(other, 0) <= max(0, lack) for other, lack in missing.items()):
            text = " with ".join(f"{key} {as_yaml(value)}" for key, value in changes.items())
            savings.append((saved, text, left[need] <= 0))
    for saved, text, enough in sorted(savings, reverse=True):
        yield f"{text}: saves {gib(saved)}{', enough' if enough else ''}"


def _actor_changes(part: RankFootprint, need: str, case: _Case) -> Iterator[Changes]:
    config = case.config
    rows = [row for row in ACTOR_REMEDIES if row.is_tried]
    yield from (row.next(config) for row in (rows if not config.trainer.colocate else [*rows, ENGINE_TP]))
    lower = math.floor(100 * (1 - part.offloaded_resident_bytes / case.gpu_bytes)) / 100
    if need == GENERATE and 0 < lower < config.rollout.gpu_memory_utilization:
        yield {"rollout.gpu_memory_utilization": lower}


def _rollout_changes(part: RankFootprint, case: _Case) -> Iterator[Changes]:
    gpu_bytes, config = case.gpu_bytes, case.config
    utilization, sync = config.rollout.gpu_memory_utilization, part.parts["weight_sync"]
    if config.trainer.device != "cpu":
        lack = _missing(part, case)["sequence"]
        higher = math.ceil(100 * (utilization + lack / gpu_bytes)) / 100
        if utilization < higher <= _MAX_UTILIZATION:
            yield {"rollout.gpu_memory_utilization": higher}
        lower = math.floor(100 * (1 - sync / gpu_bytes)) / 100
        if 0 < lower < utilization:
            yield {"rollout.gpu_memory_utilization": lower}
    on_cpu = config.trainer.device == "cpu"
    yield from (row.next(config) for row in ENGINE_REMEDIES if row.is_tried and (on_cpu or row.device != "cpu"))
