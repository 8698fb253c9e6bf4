"""Choose settings with which a run fits: a combination of remedies, and where states are during a frozen model's pass.

The rows of `gkd.memory.remedies` are tried in their order. A row is applied while a phase in which it helps does not
fit, unless the run then lacks more, or `check_config`, the model or the host's size refuses it. At the end each change
that gains nothing is taken back, the last one first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gkd.config.check import check_config
from gkd.config.schema import Config
from gkd.config.schema_teacher import ACTOR
from gkd.errors import ConfigError, ModelError
from gkd.memory import remedies
from gkd.memory.footprint.estimate import HostTotal, RunModels, host_problems, host_shortage, host_totals
from gkd.memory.footprint.limits import GIB, actor_peak, allowed_bytes, check, gib, shortages
from gkd.memory.footprint.rank import (
    GENERATE,
    WEIGHT_SYNC,
    RankFootprint,
    Refit,
    engine_of,
    other_processes_bytes,
    with_other_processes,
)
from gkd.memory.footprint.rollout import with_engine_cache, with_max_num_seqs
from gkd.memory.remedies import Changes, Remedy, as_yaml
from gkd.spans import Phase

Lacks = Callable[[Config, Sequence[RankFootprint]], int]
HOST = ("host", "memory")
_TRIED = [row for row in (*remedies.ACTOR_REMEDIES, *remedies.ENGINE_REMEDIES) if row.is_tried]

# Rows, and the phase in which they have to help, by what is short: a need of `shortages`.
_TABLES: tuple[tuple[tuple[Remedy, ...], dict[str, Phase | None]], ...] = (
    (remedies.ACTOR_REMEDIES, {"training_step": Phase.TRAIN, "optimizer_step": None}),
    (remedies.ACTOR_REMEDIES, {"teacher_pass": Phase.SCORE, "reference_pass": Phase.REFERENCE}),
    ((*remedies.ACTOR_REMEDIES, remedies.ENGINE_TP), {WEIGHT_SYNC: Phase.SEND}),
    (remedies.ENGINE_REMEDIES, {GENERATE: Phase.GENERATE, "all": Phase.GENERATE}),
    (remedies.ENGINE_REMEDIES, {"sequence": Phase.CACHE, "sync": Phase.RECEIVE}),
)


@dataclass(frozen=True, slots=True)
class Step:
    """The settings after a change, and what they need."""

    changes: Changes  # empty: the settings as given
    config: Config
    footprints: Sequence[RankFootprint]
    peak_bytes: int  # on the actor's fullest GPU
    short: Mapping[tuple[str, str], int]  # missing bytes by need, see `shortages`, and of `HOST`

    @property
    def short_bytes(self) -> int:
        """The largest lack, memory.margin included; 0 or less: everything fits."""
        return max(self.short.values())

    def lack(self) -> int:
        """Return the missing bytes of all needs together; 0: everything fits."""
        return sum(max(0, lack) for lack in self.short.values())

    def helped_by(self, row: Remedy) -> bool:
        """Return whether the row applies to the settings and helps in a phase that does not fit."""
        lacking = {need for (_, need), lack in self.short.items() if lack > 0}
        phases = [of[need] for rows, of in _TABLES if row in rows for need in lacking & of.keys()]
        return any(row.helps(self.config, phase, on_cuda=self.config.trainer.device != "cpu") for phase in phases)


@dataclass(frozen=True, slots=True)
class Combination:
    """The changes that were found; with them the run fits, or lacks less."""

    steps: tuple[Step, ...]  # the settings as given, then one per change
    more_gpus: tuple[Step, ...] = ()  # further changes, with more GPUs, if they suffice and `steps` do not

    @property
    def fits(self) -> bool:
        """Return whether the last of `steps` fits, with memory.margin."""
        return self.steps[-1].lack() == 0

    @property
    def overrides(self) -> list[str]:
        """Return all changes as `key=value`, as `load_config` takes them; with `more_gpus`, too."""
        changes = {key: value for step in (*self.steps, *self.more_gpus) for key, value in step.changes.items()}
        return [f"{key}={as_yaml(value)}" for key, value in changes.items()]


def find_combination(config: Config, refit: Refit, gpu_bytes: int, lacks_host: Lacks | None = None) -> Combination:
    """Return changes with which the run fits, or lacks less. Raises ConfigError, ModelError: the settings are invalid.

    Args:
        refit: returns the footprints of changed settings, without a teacher server's.
        gpu_bytes: memory of each GPU.
        lacks_host: returns the missing bytes of the fullest host; None: its size is unknown.
    """

    def after(steps: list[Step], *later: Changes) -> list[Step]:
        """Return the steps and those of later changes; empty if one of these is refused."""
        for changes in later:
            changed = (steps[-1].config if steps else config).with_values(changes)
            refused = (ConfigError, ModelError) if steps else ()  # errors of the settings as given are raised
            try:
                check_config(changed)
                found = refit(changed)
            except refused:
                return []
            short = shortages(found, gpu_bytes, changed) | ({HOST: lacks_host(changed, found)} if lacks_host else {})
            if steps and short.get(HOST, 0) > max(0, steps[-1].short.get(HOST, 0)):
                return []
            steps = [*steps, Step(changes, changed, found, actor_peak(found, gpu_bytes, changed), short)]
        return steps

    def search(steps: list[Step], *, more: bool) -> list[Step]:
        rows = [row for row in _TRIED if row.adds_gpus == more]
        for row, following in zip(rows, rows[1:] + rows[-1:], strict=True):
            while steps[-1].helped_by(row) and (longer := after(steps, row.next(steps[-1].config))):
                if longer[-1].lack() > steps[-1].lack():  # fsdp2 may need more, and less with its offload: the next row
                    longer = after(longer, following.next(longer[-1].config))
                if not longer or longer[-1].lack() + more > steps[-1].lack():  # more GPUs have to lessen the lack
                    break
                steps = longer
        for index in reversed(range(1, len(steps))):
            fewer = after(steps[:index], *(step.changes for step in steps[index + 1 :]))
            steps = fewer if fewer and fewer[-1].lack() <= steps[-1].lack() else steps
        return steps

    steps = search(after([], {}), more=False)
    enlarged = search(steps[-1:], more=True)
    return Combination(tuple(steps), tuple(enlarged[1:]) if enlarged[-1].lack() == 0 else ())


RESIDENT, OFFLOAD = "resident", "offload"


def with_strategy(config: Config, refit: Refit, gpu_bytes: int | None) -> tuple[Config, str]:
    """Return the settings with memory.strategy `auto` replaced, and a line on what fits; empty: nothing to choose.

    `auto` becomes `resident` if the fullest GPU then keeps memory.margin, else `offload`.

    Args:
        refit: returns the footprints of changed settings.
        gpu_bytes: memory of a GPU; None: unknown, or the ranks compute on the CPU: `auto` becomes `offload`.
    """
    offload = _changed(config, OFFLOAD if config.memory.strategy == "auto" else config.memory.strategy)
    frozen = _frozen_models(config)
    if gpu_bytes is None or not frozen or config.trainer.colocate:
        return offload, ""
    allowed = allowed_bytes(gpu_bytes, config)
    if not _changed(config, OFFLOAD).derived.moves_states:  # the frozen models are on the host: nothing to choose
        peak = _peak(_changed(config, RESIDENT, on_gpu=frozen), refit, gpu_bytes)
        keys = " ".join(f"{section}.fsdp_cpu_offload=false" for section in frozen)
        hint = f"student and frozen models fit on the GPUs together ({gib(peak)}): {keys} keeps all of them there"
        return offload, hint if peak <= allowed else ""
    peaks = {name: _peak(_changed(config, name), refit, gpu_bytes) for name in (RESIDENT, OFFLOAD)}
    chosen = config.memory.strategy
    if chosen == "auto":
        chosen = RESIDENT if peaks[RESIDENT] <= allowed else OFFLOAD
    found = [f"{name} {gib(peak)} {'fits' if peak <= allowed else 'is too large'}" for name, peak in peaks.items()]
    return _changed(config, chosen), f"memory.strategy {chosen}; of {gib(allowed)}: {', '.join(found)}"


def _frozen_models(config: Config) -> list[str]:
    """Return the sections of the frozen models on the actor's ranks."""
    derived = config.derived
    return ["teacher"] * (derived.teacher_pool == ACTOR) + ["reference"] * bool(derived.reference_folder)


def _changed(config: Config, strategy: str, on_gpu: Sequence[str] = ()) -> Config:
    """Return the settings with this strategy, and with the frozen models of these sections on the GPU."""
    on_device = {f"{section}.fsdp_cpu_offload": False for section in on_gpu}
    return config.with_values({"memory.strategy": strategy, **on_device})


def _peak(config: Config, refit: Refit, gpu_bytes: int) -> int:
    return actor_peak(with_engine_cache(refit(config), gpu_bytes, config), gpu_bytes, config)


@dataclass(frozen=True, slots=True)
class Case:
    """The settings and models of a run, and the sizes to compare their memory with."""

    config: Config
    models: RunModels
    gpu_bytes: int | None  # None: unknown
    host_bytes: int | None  # None: unknown
    scores_gib: Callable[[Config], float]  # host memory of the teacher's scores with these settings
    teacher_hidden: int | None = None  # hidden size of a teacher server's model; None: it sends no hidden states
    in_use: int = 0  # bytes of each GPU that other processes have before the pools start
    workers: tuple[RankFootprint, ...] = ()  # workers of a teacher server, if its model is known
    choice: str = ""  # line on memory.strategy; may be empty

    def settled(self) -> Case:
        """Return the case with memory.strategy `auto` and rollout.max_num_seqs 0 replaced by what fits."""
        on_gpu = None if self.config.trainer.device == "cpu" else self.gpu_bytes
        engine = engine_of(self.refit(self.config))
        config = with_max_num_seqs(self.config, engine, self.models.student.dims, on_gpu)
        config, choice = with_strategy(config, self.refit, self.gpu_bytes)
        return replace(self, config=config, choice=choice)

    def refit(self, config: Config) -> list[RankFootprint]:
        """Return the footprints of the run's own ranks with these settings."""
        others = other_processes_bytes(config, self.gpu_bytes, self.in_use)
        return with_other_processes(self.models.footprint(config, self.teacher_hidden), others, config)

    def footprints(self) -> list[RankFootprint]:
        """Return all footprints, with the KV cache that engines allocate."""
        return with_engine_cache([*self.refit(self.config), *self.workers], self.gpu_bytes, self.config)

    def hosts(self, config: Config, found: Sequence[RankFootprint]) -> list[HostTotal]:
        """Return the host memory with these settings; `found` are footprints of the run's own ranks."""
        ranks = [part for part in found if part.role != "teacher"]
        return host_totals([*ranks, *self.workers], round(self.scores_gib(config) * GIB), config)

    def problems(self) -> list[str]:
        """Return a line for each shortage of a GPU or a host."""
        found = self.footprints()
        on_gpus = [] if self.gpu_bytes is None else check(found, self.gpu_bytes, self.config)
        return [*on_gpus, *host_problems(self.hosts(self.config, found), self.host_bytes)]

    def combination(self, gpu_bytes: int) -> Combination:
        """Return what to change so that the run fits, as `find_combination`."""

        def lacks_host(changed: Config, found: Sequence[RankFootprint]) -> int:
            return host_shortage(self.hosts(changed, found), self.host_bytes or 0)

        return find_combination(self.config, self.refit, gpu_bytes, None if self.host_bytes is None else lacks_host)
