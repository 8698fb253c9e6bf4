"""Footprints as human-readable tables and as JSON data. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.footprint.limits import GIB, gib, smallest_margin
from gkd.footprint.rank import (
    HOST_PARTS,
    OTHER_PROCESSES,
    PHASES,
    UNCOUNTED_PARTS,
    RankFootprint,
    engine_of,
    shared_phases_by_rank,
)
from gkd.footprint.rollout import kv_bytes_per_token, kv_room_bytes, max_sequences
from gkd.hf.model_dims import ModelDims

_ORDER = (
    *("weights", "gradients", "optimizer", "teacher_head", "teacher_weights"),
    *("reference_weights", "kv_cache", "context", OTHER_PROCESSES),
    *(name for names in PHASES.values() for name in names),
)
_NOTE = (
    "GiB; total: resident parts + the largest of (activations + logits + transient), optimizer_step, weight_sync, "
    "teacher_pass, reference_pass. With moved_states: no states in a pass, weights alone in a sync"
)
# Names in the JSON output, which stay as they were first published.
_JSON_NAMES = {"transient": "passing", "kv_max": "kv_wanted"}

# Bytes per parameter of a whole model on one GPU, nothing sharded. The first row is the rule of thumb that is usually
# quoted; in bfloat16 small updates round away. The others are this project's: gradients and moments are float32, and
# so are the masters of bfloat16 weights.
PRECISIONS: dict[str, dict[str, int]] = {
    "all bfloat16": {"weights": 2, "gradients": 2, "masters": 0, "moments": 4},
    "this project, bfloat16": {"weights": 2, "gradients": 4, "masters": 4, "moments": 8},
    "this project, float32": {"weights": 4, "gradients": 4, "masters": 0, "moments": 8},
}


def rule_of_thumb(dims: ModelDims) -> dict[str, dict[str, int]]:
    """Return the bytes by part of a whole model in each of `PRECISIONS`; `dims` must be exact."""
    return {name: {part: size * dims.n_params for part, size in parts.items()} for name, parts in PRECISIONS.items()}


def footprint_table(footprints: Sequence[RankFootprint], gpu_bytes: int | None = None) -> str:
    """Return a table: one row per kind of rank, one column per part. Columns after the total are not included in it."""
    names = [name for name in _ORDER if any(part.parts.get(name) for part in footprints)]
    hosts = [name for name in HOST_PARTS if any(part.parts.get(name) for part in footprints)]
    uncounted = [name for name in UNCOUNTED_PARTS if any(part.parts.get(name) for part in footprints)]
    gpu = ["gpu", "share"] if gpu_bytes else []
    rows = [["role", "rank", *names, "total", *gpu, *(f"host: {name}" for name in hosts), *uncounted]]
    for part in footprints:
        row = [part.role, str(part.rank), *(_cell(part, name) for name in names), _gib(part.total_bytes)]
        if gpu_bytes:
            row += [_gib(gpu_bytes), f"{part.total_bytes / gpu_bytes:.0%}"]
        rows.append([*row, *(_cell(part, name) for name in (*hosts, *uncounted))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, _NOTE])


def shared_phases_table(footprints: Sequence[RankFootprint], gpu_bytes: int | None, config: Config) -> str:
    """Return a line for each kind of actor rank that shares its GPU with an engine, in GiB by phase."""
    lines = []
    for rank, sizes in shared_phases_by_rank(footprints, gpu_bytes, config).items():
        cells = ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items())
        lines.append(f"GiB on the GPU of actor rank {rank} and its engine, by phase: {cells}")
    return "\n".join(lines)


def rule_of_thumb_table(found: Mapping[str, Mapping[str, int]]) -> str:
    """Return the lines of `rule_of_thumb`, in units of 1e9 bytes, in which such numbers are quoted."""
    lines = ["the whole model on one rank, GB (1e9 bytes):"]
    for name, parts in found.items():
        cells = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in parts.items() if size)
        lines.append(f"  {name}: {cells}; together {sum(parts.values()) / 1e9:.1f}")
    return "\n".join(lines)


def kv_line(footprints: Sequence[RankFootprint], dims: ModelDims, gpu_bytes: int | None, config: Config) -> str:
    """Return a line with the size of an engine's KV cache, in tokens and in sequences of full length."""
    engine, each, longest = engine_of(footprints), kv_bytes_per_token(config, dims), derive(config).max_sequence_length
    line = (
        f"KV cache of an engine: {each} bytes per token and rank; up to {max_sequences(config)} sequences of up to "
        f"{longest} tokens run at a time"
    )
    if config.trainer.device == "cpu" or config.rollout.kv_cache_mib:
        room = engine.parts["kv_cache"]
    elif gpu_bytes:
        room = kv_room_bytes(engine, gpu_bytes, config)
    else:
        return line
    return f"{line}; it holds {max(0, room // each)} tokens ({max(0, room // (each * longest))} such sequences)"


def margin_line(footprints: Sequence[RankFootprint], gpu_bytes: int, config: Config) -> str:
    """Return a line for ranks that all fit: the share of the GPU that the fullest rank leaves free."""
    name, free = smallest_margin(footprints, gpu_bytes, config)
    return f"it fits: {name} leaves {free:.0%} of its GPU free (memory.margin {config.memory.margin:g})"


def as_json(
    footprints: Sequence[RankFootprint], gpu_bytes: int | None, problems: Sequence[str], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return JSON data; all sizes in bytes."""
    ranks = [
        {
            "role": part.role,
            "rank": part.rank,
            "parts": {_JSON_NAMES.get(name, name): size for name, size in part.parts.items()},
            "total_bytes": part.total_bytes,
            "host_bytes": part.host_bytes,
        }
        for part in footprints
    ]
    return {"ranks": ranks, "card_bytes": gpu_bytes, "problems": list(problems), **extra}


def totals_line(footprints: Sequence[RankFootprint]) -> str:
    """Return the totals alone, device and host together."""
    return ", ".join(f"{part.role} rank {part.rank} {gib(part.total_bytes + part.host_bytes)}" for part in footprints)


def _cell(part: RankFootprint, name: str) -> str:
    return _gib(part.parts[name]) if name in part.parts else "-"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f}"
