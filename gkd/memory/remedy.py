"""One row of the table of what to change when memory is short, and how its next value is computed. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from gkd.config.schema import Config
from gkd.config.schema_actor import BACKENDS
from gkd.spans import Phase

Changes: TypeAlias = Mapping[str, float | str]  # next value by key
MAX_UTILIZATION = 0.95  # of a GPU that an engine may take


@dataclass(frozen=True, slots=True)
class Remedy:
    """One row: a change of settings that needs less memory."""

    keys: tuple[str, ...]
    step: str  # the next value in words, for docs/memory.md
    effect: str
    next: Callable[[Config], Changes]  # empty: the row does not apply to these settings
    phases: tuple[Phase, ...] = ()  # in which it helps; empty: in all
    not_in: tuple[Phase, ...] = ()  # phases in which it does not help
    device: str = ""  # cuda | cpu; empty: both
    is_tried: bool = True  # `gkd.footprint.combination` tries it; False: training changes
    adds_gpus: bool = False

    def line(self, config: Config) -> str:
        """Return `key=value: try NEXT. EFFECT` for these settings, to which the row applies."""
        changes = self.next(config)
        now = ", ".join(f"{key}={value_of(config, key)}" for key in changes)
        return f"{now}: try {', '.join(as_yaml(value) for value in changes.values())}. {self.effect}."

    def helps(self, config: Config, phase: Phase | None, *, on_cuda: bool) -> bool:
        """Return whether the row applies to these settings and helps in this phase; None: one that no row names."""
        in_phase = (not self.phases or phase in self.phases) and phase not in self.not_in
        return in_phase and self.device in ("", "cuda" if on_cuda else "cpu") and bool(self.next(config))


def with_changes(config: Config, changes: Changes) -> Config:
    """Return a copy of the settings with these values; nothing is checked."""
    for key, value in changes.items():
        config = _with_value(config, key.split("."), value)
    return config


def _with_value(section: Any, names: Sequence[str], value: object) -> Any:
    name, *inner = names
    return replace(section, **{name: _with_value(getattr(section, name), inner, value) if inner else value})


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


def can_offload_shards(config: Config) -> bool:
    """Return whether the student's backend can keep its shards in host memory."""
    return config.actor.backend.supports("fsdp_cpu_offload", True)


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


def token_budget(config: Config) -> Changes:
    """Return half of the tokens of a micro-batch, at least the longest sequence; only with a budget."""
    budget, longest = config.actor.max_tokens_per_micro_batch, config.derived.max_sequence_length
    return {"actor.max_tokens_per_micro_batch": max(longest, budget // 2)} if budget > longest else {}


def first_token_budget(config: Config) -> Changes:
    """Return a budget of as many tokens as a micro-batch has now; only without one."""
    budget, longest = config.actor.max_tokens_per_micro_batch, config.derived.max_sequence_length
    return {} if budget else {"actor.max_tokens_per_micro_batch": config.actor.micro_batch_size * longest}


def smaller_cache(config: Config) -> Changes:
    """Return half of the KV cache that has a given size, or its size on the CPU."""
    now = config.rollout.kv_cache_bytes(on_cpu=config.trainer.device == "cpu")
    return {"rollout.kv_cache_mib": now >> 21} if now and now >> 21 else {}


def larger_cache(config: Config) -> Changes:
    """Return twice the KV cache that has a given size."""
    now = config.rollout.kv_cache_mib
    return {"rollout.kv_cache_mib": 2 * now} if now else {}


def less_utilization(config: Config) -> Changes:
    """Return a smaller share of the GPU for an engine, if its KV cache has no given size."""
    lower = round(config.rollout.gpu_memory_utilization - 0.1, 2)
    return {"rollout.gpu_memory_utilization": lower} if lower > 0 and not config.rollout.kv_cache_mib else {}


def more_utilization(config: Config) -> Changes:
    """Return a larger share of the GPU for an engine, up to `MAX_UTILIZATION`, if its KV cache has no given size."""
    now = config.rollout.gpu_memory_utilization
    higher = min(MAX_UTILIZATION, round(now + 0.05, 2))
    return {"rollout.gpu_memory_utilization": higher} if higher > now and not config.rollout.kv_cache_mib else {}


def to_fsdp2(config: Config) -> Changes:
    """Return the change of the backend, with the keys that it does not support."""
    if config.actor.strategy == "fsdp2":
        return {}
    changes: dict[str, Any] = {"actor.strategy": "fsdp2"}
    for name, limit in BACKENDS["fsdp2"].limits.items():
        if getattr(config.actor, name) not in limit.values:
            changes[f"actor.{name}"] = limit.values[-1]
    return changes


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
    """Return a `next` that doubles `key`, actor.tp or actor.pp, and the GPUs of the pool, if the backend has it."""

    def split(config: Config) -> Changes:
        value = value_of(config, key)
        assert isinstance(value, int)
        supported = config.actor.backend.supports(key.removeprefix("actor."), 2 * value)
        return {key: 2 * value, **more_gpus(config)} if supported else {}

    return split
