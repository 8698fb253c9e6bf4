"""Format a `GpuMap` as a human-readable table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gkd.cluster.gpu_table import RUN_ENDED, TEACHER, Finding, GpuInfo, GpuMap, RankPlacement

_HEADS = (
    *("POOL", "RANK", "LOCAL", "HOST", "PID", "CUDA_VISIBLE_DEVICES", "GPU IDS", "VISIBLE", "CURRENT"),
    *("GPU", "UUID", "PCI BUS", "NUMA", "FREE MEMORY"),
)


def gpu_report(gpu_map: GpuMap) -> str:
    """Format one row per rank, then the settings, notes and findings. Columns without a value are left out."""
    rows = [_cells(row) for row in gpu_map.rows]
    columns = [
        (head, *cells)
        for head, *cells in zip(_HEADS, *rows, strict=True)
        if not cells or any(cell != "-" for cell in cells)
    ]
    widths = [max(map(len, column)) for column in columns]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]
    gpus = ",".join(map(str, gpu_map.gpus)) or "all"
    on_cpu = " On the CPU an id numbers a process, not a GPU." if gpu_map.device == "cpu" else ""
    settings = [f"cluster.gpus: {gpus}. The actor gets the lowest ids.{on_cpu}"]
    notes = [f"note: {_printable(note)}" for note in gpu_map.notes]
    findings = [_verdict(finding) for finding in gpu_map.findings]
    return "\n".join([*table, *settings, *notes, *(findings or ["no problems found"])])


def _cells(row: RankPlacement) -> tuple[str, ...]:
    visible = row.cuda_visible_devices
    cells = (
        row.pool,
        f"{row.rank} ({row.name})" if row.name else str(row.rank),
        _text(row.local_rank),
        row.host,
        str(row.pid),
        "unset" if visible is None else visible or "empty",
        _ids(row),
        str(len(row.gpus)),
        _text(row.current_device),
        _each(row.gpus, lambda gpu: gpu.name),
        _each(row.gpus, lambda gpu: gpu.uuid),
        _each(row.gpus, lambda gpu: gpu.pci_bus),
        _each(row.gpus, lambda gpu: gpu.numa_node),
        _each(row.gpus, _memory),
    )
    return tuple(_printable(cell) for cell in cells)


def _verdict(finding: Finding) -> str:
    if finding.kind == RUN_ENDED:
        return f"run ended: {_printable(finding.problem)}"
    return f"WRONG {finding.kind}: {_printable(str(finding))}"


def _ids(row: RankPlacement) -> str:
    """Return the ids that Ray assigned, or that a teacher's worker announces: without a GPU the labels of --gpus."""
    if row.ray_gpu_ids is not None:
        return ",".join(row.ray_gpu_ids)
    return ",".join(gpu.id for gpu in row.gpus) or ("cpu" if row.pool == TEACHER else "-")


def _each(gpus: Iterable[GpuInfo], field: Callable[[GpuInfo], object]) -> str:
    """Format a field of every GPU; a single value if all are equal."""
    texts = [_text(field(gpu)) for gpu in gpus]
    return ", ".join(texts if len(set(texts)) > 1 else texts[:1]) or "-"


def _memory(gpu: GpuInfo) -> str | None:
    if gpu.memory_free_mib is None or gpu.memory_total_mib is None:
        return None
    return f"{gpu.memory_free_mib / 1024:.1f} of {gpu.memory_total_mib / 1024:.1f} GiB"


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _printable(text: str) -> str:
    """Replace control characters: a teacher worker chooses its name, and must not control the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
