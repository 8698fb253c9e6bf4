"""Compare footprints with the memory of a GPU and of a host, and find the changes with which a run fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gkd.config.check import check_config
from gkd.config.schema import Config
from gkd.errors import ConfigError, ModelError
from gkd.memory.footprint.estimate import HOST_PARTS, MOVED_STATES, RankFootprint, RunModels, engine_limit, footprint
from gkd.memory.remedies import TABLE, Changes, overrides
from gkd.spans import Phase

GIB = 1 << 30
MARGIN = 0.1  # share of a GPU that stays free, for fragmentation and what no prediction counts
HOST = "host"


@dataclass(frozen=True, slots=True)
class Need:
    """Hold what a rank, or a host, needs in a phase, and what it may have; in bytes."""

    role: str  # actor | rollout, whose settings help; or `HOST`
    who: str
    phase: Phase
    n_bytes: int
    limit: int
    of: str  # what the limit is

    @property
    def lack(self) -> int:
        return max(0, self.n_bytes - self.limit)

    def line(self) -> str:
        phase = "" if self.role == HOST else f" ({self.phase})"
        return f"{self.who}{phase} needs {gib(self.n_bytes)}, {gib(self.lack)} more than {self.of}"


def gib(n_bytes: float) -> str:
    """Return a size such as "1.50 GiB"."""
    return f"{n_bytes / GIB:.2f} GiB"


def gpu_phases(part: RankFootprint, engine: RankFootprint, config: Config) -> dict[Phase, int]:
    """Return the bytes on the GPU of an actor rank by phase, with its engine if they share it (`trainer.colocate`).

    While the engine generates, the actor's states are in host memory. In the actor's phases the engine sleeps, but in a
    weight sync it has its weights; its CUDA context is never released.
    """
    phases = part.phases()
    if not config.trainer.colocate or config.trainer.device == "cpu":
        return phases
    phases = {phase: size + engine.parts["context"] for phase, size in phases.items()}
    phases[Phase.SEND] += engine.sum_of(("weights", "weight_sync"))
    return {Phase.GENERATE: engine.total_bytes + part.resident_bytes - part.sum_of(MOVED_STATES), **phases}


def needs(footprints: Sequence[RankFootprint], gpu_bytes: int, config: Config) -> list[Need]:
    """Return what each rank needs of its GPU; `footprints` are of `footprint` on such a GPU.

    An engine takes its share of the GPU, which has to leave room for a weight sync, or has a KV cache of a given size.
    vLLM does not start without room in its cache for one sequence of full length.
    """
    *actors, engine = footprints
    allowed = round(gpu_bytes * (1 - MARGIN))
    utilization = config.rollout.gpu_memory_utilization
    limit = f"{1 - MARGIN:.0%} of the GPU's {gib(gpu_bytes)}"
    cache = engine.parts["kv_cache"]
    of = f"the {gib(cache)} that its KV cache has, for a sequence of {config.derived.max_engine_length} tokens"
    listed = [Need("rollout", engine.name, Phase.CACHE, engine.sequence_bytes, cache, of)]
    for part in actors:
        for phase, size in gpu_phases(part, engine, config).items():
            role = "rollout" if phase == Phase.GENERATE else "actor"  # whose settings help
            listed.append(Need(role, part.name, phase, size, allowed, limit))
    if config.trainer.colocate:
        return listed
    if config.rollout.kv_cache_bytes(on_cpu=config.trainer.device == "cpu") is not None:
        return [*listed, Need("rollout", engine.name, Phase.GENERATE, engine.total_bytes, allowed, limit)]
    left = round(gpu_bytes * (1 - utilization))
    size = engine.sum_of(("weight_sync", "teacher_server"))
    of = f"the {gib(left)} that rollout.gpu_memory_utilization={utilization} leaves"
    return [*listed, Need("rollout", engine.name, Phase.RECEIVE, size, left, of)]


def check(footprints: Sequence[RankFootprint], gpu_bytes: int, config: Config) -> list[str]:
    """Return one line for each of `needs` that is not met; empty if everything fits."""
    return [need.line() for need in needs(footprints, gpu_bytes, config) if need.lack]


def host_bytes(footprints: Sequence[RankFootprint], config: Config, scores_gib: float) -> int:
    """Return the most bytes in the memory of a node, without libraries; on the CPU with all of its ranks."""
    *_, engine = footprints
    trainer = config.trainer
    on_cpu = config.trainer.device == "cpu"
    sizes = [part.sum_of(HOST_PARTS) + on_cpu * part.total_bytes for part in footprints]
    actor = max(sizes[:-1]) * trainer.n_gpus_per_node + round(scores_gib * GIB) // trainer.nnodes
    engines = sizes[-1] * config.rollout.n_gpus_per_node
    if config.rollout.max_restarts:  # the weights that an engine gets when it is started again
        actor += config.rollout.tp * engine.parts["weights"]
    return actor + engines if trainer.colocate or not config.cluster.ray_address else max(actor, engines)


@dataclass(frozen=True, slots=True)
class Case:
    """The settings and models of a run, and the sizes to compare their memory with."""

    config: Config
    models: RunModels
    gpu_bytes: int | None  # None: unknown
    host_limit: int | None  # bytes of a host's memory; None: unknown
    scores_gib: float = 0.0  # host memory of the teacher's scores on all nodes

    def footprints(self) -> tuple[RankFootprint, ...]:
        """Return `footprint` of the run."""
        return footprint(self.config, self.models, self.gpu_bytes)

    def needs(self) -> list[Need]:
        """Return what each rank needs of its GPU, and each host of its memory, where their sizes are known."""
        footprints = self.footprints()
        listed = [] if self.gpu_bytes is None else needs(footprints, self.gpu_bytes, self.config)
        if self.host_limit is not None:
            size = host_bytes(footprints, self.config, self.scores_gib)
            of = f"its memory of {gib(self.host_limit)}"
            listed.append(Need(HOST, "a host", Phase.STEP, size, self.host_limit, of))
        return listed

    def problems(self) -> list[str]:
        """Return a line for each shortage."""
        return [need.line() for need in self.needs() if need.lack]

    def settled(self) -> Case:
        """Return the case with memory.strategy `auto` and rollout.max_num_seqs 0 replaced by what fits.

        `auto` becomes `resident` if frozen models stay on the GPU, and the student's states fit there, too.
        """
        gpu_bytes = None if self.config.trainer.device == "cpu" else self.gpu_bytes
        *_, engine = self.footprints()
        limit = engine_limit(self.config, engine, gpu_bytes)
        config = self.config.with_values({"rollout.max_num_seqs": limit})
        if config.memory.strategy != "auto":
            return replace(self, config=config)
        offload = replace(self, config=config.with_values({"memory.strategy": "offload"}))
        resident = replace(self, config=config.with_values({"memory.strategy": "resident"}))
        stays = offload.config.derived.moves_states and not resident.config.derived.moves_states
        fits = gpu_bytes is not None and not any(need.lack for need in resident.needs() if need.role == "actor")
        return resident if stays and fits else offload

    def fitting(self) -> tuple[Changes, Case]:
        """Apply the rows of `gkd.memory.remedies.TABLE` in their order until the run fits; return (changes, result).

        A row is applied while it lessens what is missing. Rows with more GPUs come last. At the end, changes without
        which as little is missing are taken back.
        """
        applied: list[Changes] = []
        now = self
        listed = self.needs()
        for row in sorted(TABLE, key=lambda row: row.adds_gpus):
            while any(row.helps(now.config, need.role, need.phase) for need in listed if need.lack):
                changes = row.next(now.config)
                later = self._with([*applied, changes])
                if later is None or _missing(later.needs()) >= _missing(listed):
                    break
                applied.append(changes)
                now = later
                listed = later.needs()
        for changes in reversed(applied):
            fewer = [other for other in applied if other is not changes]
            without = self._with(fewer)
            if without is not None and _missing(without.needs()) <= _missing(listed):
                applied = fewer
                now = without
        return _joined(applied), now

    def _with(self, applied: Sequence[Changes]) -> Case | None:
        """Return the case with these changes; None: the settings, the model or the host's size refuse them."""
        later = replace(self, config=self.config.with_values(_joined(applied)))
        try:
            check_config(later.config)
            lacks = [need.lack for need in later.needs() if need.role == HOST]
        except (ConfigError, ModelError):
            return None
        return None if lacks > [need.lack for need in self.needs() if need.role == HOST] else later


def _joined(applied: Sequence[Changes]) -> Changes:
    return {key: value for changes in applied for key, value in changes.items()}


def _missing(listed: Sequence[Need]) -> int:
    return sum(need.lack for need in listed)


def table(case: Case) -> str:
    """Return a line for each kind of rank, with its parts in GiB, largest first."""
    lines = []
    for part in case.footprints():
        phases = gpu_phases(part, case.footprints()[-1], case.config) if part.role == "actor" else part.phases()
        sizes = sorted((size, name) for name, size in part.parts.items() if size)
        items = ", ".join(f"{'host: ' * (name in HOST_PARTS)}{name} {size / GIB:.2f}" for size, name in reversed(sizes))
        peak, phase = max((size, str(phase)) for phase, size in phases.items())
        share = "" if case.gpu_bytes is None else f", {peak / case.gpu_bytes:.0%} of the GPU"
        n_fit = part.parts.get("kv_cache", 0) // max(1, part.sequence_bytes)
        cached = f" (cache for {n_fit} sequences of full length)" if part.role == "rollout" else ""
        lines.append(f"{part.name}: peak {gib(peak)} ({phase}){share}; GiB: {items}{cached}")
    return "\n".join(lines)


def remedy_lines(case: Case, command: str) -> list[str]:
    """Return lines with the changes with which the run fits, or lacks less, after the command of the run."""
    changes, result = case.fitting()
    verdict = "it does not fit with these settings, which need the least" if result.problems() else "it fits with"
    return [f"{verdict}: {' '.join([command, *overrides(changes)])}", *result.problems()]
