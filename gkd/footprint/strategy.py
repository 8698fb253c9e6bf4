"""Choose where the student's states are while a frozen model on the actor's GPUs computes (`memory.strategy`)."""

from __future__ import annotations

from collections.abc import Sequence

from gkd.config.key_list import with_values
from gkd.config.schema import Config
from gkd.config.schema_teacher import ACTOR
from gkd.footprint.limits import actor_peak, allowed_bytes, gib
from gkd.footprint.rank import Refit
from gkd.footprint.rollout import with_engine_cache

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
    return with_values(config, {"memory.strategy": strategy, **on_device})


def _peak(config: Config, refit: Refit, gpu_bytes: int) -> int:
    return actor_peak(with_engine_cache(refit(config), gpu_bytes, config), gpu_bytes, config)
