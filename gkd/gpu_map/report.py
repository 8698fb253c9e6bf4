"""A `GpuMap` as text for people. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gkd.cluster.gpu_table import Card, GpuMap, RankPlace

_HEADS = (
    *("POOL", "RANK", "LOCAL", "HOST", "PID", "CUDA_VISIBLE_DEVICES", "RAY'S IDS", "VISIBLE", "CURRENT"),
    *("GPU", "UUID", "PCI BUS", "NUMA", "FREE MEMORY"),
)


def place_table(survey: GpuMap) -> str:
    """One row a rank, then what the settings say, notes and verdicts; as wide as it has to be."""
    rows = [_HEADS, *(_cells(row) for row in survey.rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    gpus, order = ",".join(map(str, survey.gpus)) or "all", ", then ".join(survey.order)
    told = [f"cluster.gpus: {gpus}; the low ids go to: {order}"] if order else []
    notes = [f"note: {_printable(note)}" for note in survey.notes]
    verdicts = [f"WRONG {verdict.kind}: {_printable(str(verdict))}" for verdict in survey.verdicts]
    return "\n".join([*table, *told, *notes, *(verdicts or ["nothing is wrong with it"])])


def _cells(row: RankPlace) -> tuple[str, ...]:
    visible = row.cuda_visible_devices
    cells = (
        row.pool,
        f"{row.rank} ({row.name})" if row.name else str(row.rank),
        _text(row.local_rank),
        row.host,
        str(row.pid),
        "unset" if visible is None else visible or "empty",
        ",".join(row.ray_gpu_ids) if row.ray_gpu_ids is not None else "-",
        str(len(row.cards)),
        _text(row.current_device),
        _each(row.cards, lambda card: card.name),
        _each(row.cards, lambda card: card.uuid),
        _each(row.cards, lambda card: card.pci_bus),
        _each(row.cards, lambda card: card.numa_node),
        _each(row.cards, _memory),
    )
    return tuple(_printable(cell) for cell in cells)


def _each(cards: Iterable[Card], what: Callable[[Card], object]) -> str:
    """One for each card, or one for all if they are alike."""
    texts = [_text(what(card)) for card in cards]
    return ", ".join(texts if len(set(texts)) > 1 else texts[:1]) or "-"


def _memory(card: Card) -> str | None:
    if card.memory_free_mib is None or card.memory_total_mib is None:
        return None
    return f"{card.memory_free_mib / 1024:.1f} of {card.memory_total_mib / 1024:.1f} GiB"


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _printable(text: str) -> str:
    """A teacher's worker chooses its name: it must not steer the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
