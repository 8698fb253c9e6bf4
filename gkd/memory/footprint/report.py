"""Format footprints, totals of pools and hosts, and changes that save memory, as text and as JSON data. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gkd.config.schema import Config
from gkd.hf.model_dims import ModelDims
from gkd.memory.footprint.combination import HOST, Combination, Step
from gkd.memory.footprint.estimate import HostTotal, PoolTotal, host_shortage
from gkd.memory.footprint.limits import GIB, gib, smallest_margin
from gkd.memory.footprint.rank import (
    HOST_PARTS,
    OTHER_PROCESSES,
    PHASES,
    UNCOUNTED_PARTS,
    RankFootprint,
    engine_of,
    shared_phases_by_rank,
)
from gkd.memory.footprint.rollout import kv_bytes_per_token, kv_room_bytes, max_sequences
from gkd.memory.remedies import as_yaml

_ORDER = (
    *("weights", "gradients", "optimizer", "teacher_head", "teacher_weights"),
    *("reference_weights", "kv_cache", "context", OTHER_PROCESSES),
    *(name for names in PHASES.values() for name in names),
)
_LARGEST = 3  # parts that are named as the bound
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
    engine, each, longest = engine_of(footprints), kv_bytes_per_token(config, dims), config.derived.max_engine_length
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


def combination_lines(found: Combination, command: str = "") -> list[str]:
    """Return lines with each change and its effect, and the overrides to paste.

    Args:
        command: that the overrides are appended to.
    """
    rows = [("settings as given", found.steps[0]), *_rows(found.steps[1:])]
    rows += [(f"{text} (more GPUs)", step) for text, step in _rows(found.more_gpus)]
    width = max(len(text) for text, _ in rows)
    lines = [
        "changes, in the order of docs/memory.md (GiB; peak: on the actor's fullest GPU; short: until "
        f"{found.steps[0].config.memory.margin:.0%} of it are free, or what an engine or a host lacks):",
        *(f"  {text:{width}}  peak {_gib(step.peak_bytes):>7}  {_short(step)}" for text, step in rows),
    ]
    if not found.fits:
        last = found.steps[-1]
        lines.append(
            f"these changes are not enough on these GPUs: {gib(last.short_bytes)} are missing, at a peak of "
            f"{gib(last.peak_bytes)} on the actor's fullest GPU. Bound: {bound(last)}"
        )
    if found.fits or found.more_gpus:
        lines.append("all changes together, to paste:")
        lines.append("  " + " ".join(filter(None, (command, *found.overrides))))
    return lines


def bound(step: Step) -> str:
    """Return what is short, with the largest parts of the rank."""
    (role, need), _ = max(step.short.items(), key=lambda item: item[1])
    if (role, need) == HOST:
        return "the memory of the host"
    rank = max((part for part in step.footprints if part.role == role), key=lambda part: part.total_bytes)
    on_device = [(size, name) for name, size in rank.parts.items() if name not in (*HOST_PARTS, *UNCOUNTED_PARTS)]
    largest = ", ".join(f"{name} {gib(size)}" for size, name in sorted(on_device, reverse=True)[:_LARGEST])
    return f"{need} of {role} rank {rank.rank} ({largest})"


def totals_lines(pools: Sequence[PoolTotal], hosts: Sequence[HostTotal], host_bytes: int | None) -> list[str]:
    """Return a line for each pool and each host."""
    lines = [
        f"GPUs of the pool {pool.pool}: {pool.n_gpus}, at most {gib(pool.largest)} each, {gib(pool.total)} together"
        for pool in pools
    ]
    for host in hosts:
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in sorted(host.parts.items(), key=lambda it: -it[1]))
        verdict = ""
        if host_bytes is not None:
            verdict = f" of {gib(host_bytes)}, {'it fits' if host.total <= host_bytes else 'TOO LARGE'}"
        lines.append(f"host memory of {host.host}: {gib(host.total)}{verdict} ({parts})")
    return lines


def combination_json(found: Combination) -> dict[str, Any]:
    """Return JSON data; sizes in bytes."""
    steps = [
        {"changes": dict(step.changes), "peak_bytes": step.peak_bytes, "short_bytes": max(0, step.short_bytes)}
        for step in (*found.steps, *found.more_gpus)
    ]
    return {"fits": found.fits, "overrides": found.overrides, "more_gpus": bool(found.more_gpus), "steps": steps}


def totals_json(pools: Sequence[PoolTotal], hosts: Sequence[HostTotal], host_bytes: int | None) -> dict[str, Any]:
    """Return JSON data; sizes in bytes."""
    return {
        "pools": [
            {"pool": pool.pool, "n_gpus": pool.n_gpus, "largest_bytes": pool.largest, "total_bytes": pool.total}
            for pool in pools
        ],
        "hosts": [{"host": host.host, "parts": host.parts, "total_bytes": host.total} for host in hosts],
        "host_bytes": host_bytes,
        "host_fits": None if host_bytes is None else host_shortage(hosts, host_bytes) <= 0,
    }


def _rows(steps: Sequence[Step]) -> Iterator[tuple[str, Step]]:
    for step in steps:
        yield "+ " + " ".join(f"{key}={as_yaml(value)}" for key, value in step.changes.items()), step


def _short(step: Step) -> str:
    return f"short {_gib(step.short_bytes):>7}" if step.short_bytes > 0 else "fits"


def _cell(part: RankFootprint, name: str) -> str:
    return _gib(part.parts[name]) if name in part.parts else "-"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f}"
