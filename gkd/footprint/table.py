"""Footprints as text and as JSON data. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.footprint.limits import gib, kv_room_bytes
from gkd.footprint.rollout import kv_bytes_per_token, sequences_together
from gkd.footprint.types import HOST_PARTS, MOMENTS, WANTED_PARTS, RankFootprint
from gkd.hf.model_dims import ModelDims

_GIB = 1 << 30
_ORDER = (
    *("weights", "gradients", "optimizer", "teacher_head", "teacher_weights"),
    *("reference_weights", "kv_cache", "context"),
    *(name for names in MOMENTS.values() for name in names),
)
_NOTE = (
    "GiB; total: what stays + the largest of (activations + logits + passing), optimizer_step, weight_sync, "
    "teacher_pass, reference_pass; with moved_states a pass finds no states, a sync weights alone"
)


def footprint_table(footprints: Sequence[RankFootprint], card_bytes: int | None = None) -> str:
    """One row a kind of rank, one column a part; the last ones are in no total: host memory, and a wanted cache."""
    names = [name for name in _ORDER if any(part.parts.get(name) for part in footprints)]
    hosts = [name for name in HOST_PARTS if any(part.parts.get(name) for part in footprints)]
    wanted = [name for name in WANTED_PARTS if any(part.parts.get(name) for part in footprints)]
    card = ["card", "share"] if card_bytes else []
    rows = [["role", "rank", *names, "total", *card, *(f"host: {name}" for name in hosts), *wanted]]
    for part in footprints:
        row = [part.role, str(part.rank), *(_cell(part, name) for name in names), _gib(part.total_bytes)]
        if card_bytes:
            row += [_gib(card_bytes), f"{part.total_bytes / card_bytes:.0%}"]
        rows.append([*row, *(_cell(part, name) for name in (*hosts, *wanted))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, _NOTE])


def reference_table(found: Mapping[str, Mapping[str, int]]) -> str:
    """What `reference` found, in units of 1e9 bytes, as such numbers are quoted."""
    lines = ["the whole model on one rank, GB (1e9 bytes):"]
    for name, parts in found.items():
        cells = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in parts.items() if size)
        lines.append(f"  {name}: {cells}; together {sum(parts.values()) / 1e9:.1f}")
    return "\n".join(lines)


def kv_line(footprints: Sequence[RankFootprint], dims: ModelDims, card_bytes: int | None, config: Config) -> str:
    """How many tokens an engine's KV cache holds, and how many its sequences may have."""
    (engine,) = (part for part in footprints if part.role == "rollout")
    each, longest = kv_bytes_per_token(config, dims), derive(config).max_sequence_length
    wanted = sequences_together(config)
    line = f"KV cache of an engine: {each} bytes a token and rank; {wanted} sequences may run, of {longest} tokens"
    if config.trainer.device == "cpu":
        room = engine.parts["kv_cache"]
    elif card_bytes:
        room = kv_room_bytes(engine, card_bytes, config)
    else:
        return line
    return f"{line}; there is room for {max(0, room // each)} tokens ({max(0, room // (each * longest))} of them)"


def as_json(
    footprints: Sequence[RankFootprint], card_bytes: int | None, problems: Sequence[str], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """JSON data; all sizes in bytes."""
    ranks = [
        {
            "role": part.role,
            "rank": part.rank,
            "parts": part.parts,
            "total_bytes": part.total_bytes,
            "host_bytes": part.host_bytes,
        }
        for part in footprints
    ]
    return {"ranks": ranks, "card_bytes": card_bytes, "problems": list(problems), **extra}


def sums_line(footprints: Sequence[RankFootprint]) -> str:
    """The totals alone."""
    return ", ".join(f"{part.role} rank {part.rank} {gib(part.total_bytes + part.host_bytes)}" for part in footprints)


def _cell(part: RankFootprint, name: str) -> str:
    return _gib(part.parts[name]) if name in part.parts else "-"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.2f}"
