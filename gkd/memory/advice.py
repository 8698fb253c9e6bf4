"""Select what to change after an out-of-memory error: the run's own keys, with their present and next values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gkd.config.schema import Config
from gkd.memory.remedies import (
    ACTOR_REMEDIES,
    ALLOCATOR_VARIABLES,
    ENGINE_REMEDIES,
    EXPANDABLE,
    FRAGMENTATION_REMEDIES,
)
from gkd.memory.remedy import Remedy
from gkd.spans import Phase


@dataclass(frozen=True, slots=True)
class Shortage:
    """The properties of an out-of-memory error that the advice depends on."""

    phase: Phase
    on_cuda: bool
    fragmented: bool


def advice(config: Config, shortage: Shortage, environ: Mapping[str, str]) -> list[str]:
    """Return `key=value: try NEXT. EFFECT` for an actor rank, most effective first; only keys that can still change."""
    lines = _lines(ACTOR_REMEDIES, config, shortage)
    if shortage.fragmented:
        lines = [*_expandable_segments(environ), *_lines(FRAGMENTATION_REMEDIES, config, shortage), *lines]
    return [*dict.fromkeys(lines), _larger(config, shortage)]


def engine_advice(config: Config, shortage: Shortage) -> list[str]:
    """Return the same for a rollout engine."""
    return [*_lines(ENGINE_REMEDIES, config, shortage), _larger(config, shortage)]


def _lines(rows: Sequence[Remedy], config: Config, shortage: Shortage) -> list[str]:
    return [row.line(config) for row in rows if row.helps(config, shortage.phase, on_cuda=shortage.on_cuda)]


def _larger(config: Config, shortage: Shortage) -> str:
    if not shortage.on_cuda:
        return "or use a host with more memory"
    tool = f"python -m gkd.tools.memory --config {config.trainer.run_dir}/config.yaml"
    return f"or use a GPU with more memory; for a combination of changes: {tool}"


def has_expandable_segments(environ: Mapping[str, str]) -> bool:
    """Return whether torch's allocator makes segments of pages, which it can join."""
    return any(EXPANDABLE in environ.get(name, "") for name in ALLOCATOR_VARIABLES)


def _expandable_segments(environ: Mapping[str, str]) -> list[str]:
    if has_expandable_segments(environ):
        return []
    return [
        f"{ALLOCATOR_VARIABLES[1]}={EXPANDABLE} in the environment that the trainer is started in (with "
        "cluster.ray_address: in that of `ray start` on each node). Free pieces can then be joined."
    ]
