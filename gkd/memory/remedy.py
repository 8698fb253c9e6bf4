"""One row of the table of what to change when memory is short, and how its next value is computed. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from gkd.config.schema import Config

Changes: TypeAlias = Mapping[str, float | str]  # next value by key


@dataclass(frozen=True, slots=True)
class Remedy:
    """One row: a change of settings that needs less memory."""

    keys: tuple[str, ...]
    step: str  # the next value in words
    effect: str
    next: Callable[[Config], Changes]  # empty: the row does not apply to these settings
    phases: tuple[str, ...] = ()  # in which it helps; empty: in all
    not_in: tuple[str, ...] = ()  # phases in which it does not help
    device: str = ""  # cuda | cpu; empty: both
    is_tried: bool = True  # `gkd.footprint.limits` tries it; False: training changes, or the value depends on the GPU

    def line(self, config: Config) -> str:
        """Return `key=value: try NEXT. EFFECT` for these settings, to which the row applies."""
        changes = self.next(config)
        now = ", ".join(f"{key}={value_of(config, key)}" for key in changes)
        return f"{now}: try {', '.join(as_yaml(value) for value in changes.values())}. {self.effect}."

    def helps(self, config: Config, phase: str, *, on_cuda: bool) -> bool:
        """Return whether the row applies to these settings and helps in this phase."""
        in_phase = (not self.phases or phase in self.phases) and phase not in self.not_in
        return in_phase and self.device in ("", "cuda" if on_cuda else "cpu") and bool(self.next(config))


def as_yaml(value: object) -> str:
    """Return a setting's value as it is written in YAML or on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def value_of(config: Config, key: str) -> object:
    """Return the setting at a dotted key."""
    found: object = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def always(config: Config) -> bool:
    """Return True: the row applies to all settings."""
    return True


def set_to(key: str, value: float | str, applies: Callable[[Config], bool]) -> Callable[[Config], Changes]:
    """Return a `next` that gives `key` the value wherever it has another one and `applies`."""
    return lambda config: {key: value} if value_of(config, key) != value and applies(config) else {}


def halve(key: str, low: int, applies: Callable[[Config], bool] = always) -> Callable[[Config], Changes]:
    """Return a `next` that halves `key` down to `low`, wherever it is larger and `applies`."""

    def halved(config: Config) -> Changes:
        now = value_of(config, key)
        assert isinstance(now, int)
        return {key: max(low, now // 2)} if now > low and applies(config) else {}

    return halved


def more_gpus(config: Config) -> dict[str, float | str]:
    """Return the pools of twice as many GPUs; colocated pools have the same size."""
    doubled = 2 * config.trainer.n_gpus_per_node
    pools: dict[str, float | str] = {"trainer.n_gpus_per_node": doubled}
    return {**pools, "rollout.n_gpus_per_node": doubled} if config.trainer.colocate else pools


def more_engine_gpus(config: Config) -> Changes:
    """Return engines of twice as many GPUs, and a pool for as many of them as before."""
    rollout = config.rollout
    return {"rollout.tp": 2 * rollout.tp, "rollout.n_gpus_per_node": 2 * rollout.n_gpus_per_node}


def split_further(key: str) -> Callable[[Config], Changes]:
    """Return a `next` that doubles `key`, actor.tp or actor.pp, and the GPUs of the pool; only for megatron."""

    def split(config: Config) -> Changes:
        if config.actor.strategy != "megatron":
            return {}
        value = value_of(config, key)
        assert isinstance(value, int)
        return {key: 2 * value, **more_gpus(config)}

    return split
