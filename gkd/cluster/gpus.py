"""List the GPUs of this machine with `nvidia-smi`, in bounded time and without a CUDA context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from gkd.cluster.gpu_table import GpuInfo
from gkd.errors import ConfigError
from gkd.log import get_logger
from teacher_server.wire.nvidia_smi import SmiError, run_nvidia_smi, visible_ids

log = get_logger("gpus")

_LIMIT_S = 10.0
_LEAST_GIB, _MOST_GIB = 2**-10, 2**20  # 1 MiB to 1 PiB
_GPUS = "--query-gpu=index,uuid,name,pci.bus_id,memory.total,memory.free"
_PROCESSES = "--query-compute-apps=gpu_uuid,pid"
_SYS = Path("/sys/bus/pci/devices")


def machine_gpus() -> list[GpuInfo]:
    """Return all GPUs; empty if `nvidia-smi` is missing, may not be run, or fails (a failure is logged)."""
    gpus = parse_gpus(_query(_GPUS))
    return with_processes(gpus, _query(_PROCESSES)) if gpus else []


def driver_version() -> str | None:
    """Return the version of the GPU driver, or None if it is unknown, as for `machine_gpus`."""
    listed = _query("--query-gpu=driver_version").split()
    return listed[0] if listed else None


def gpu_memory_bytes(gpu_gib: float | None) -> int | None:
    """Return the memory per GPU that a tool plans with: the given size, else the smallest GPU here, else None.

    Raises:
        ConfigError: `gpu_gib` (from `--gpu-gib`) is out of range.
    """
    if gpu_gib is None:
        sizes = [gpu.memory_total_mib for gpu in machine_gpus() if gpu.memory_total_mib]
        return min(sizes) << 20 if sizes else None
    if not _LEAST_GIB <= gpu_gib <= _MOST_GIB:  # NaN is refused, too
        fix = "give the GPU's memory in GiB, for example 80."
        raise ConfigError("--gpu-gib", gpu_gib, f"not between {_LEAST_GIB} and {_MOST_GIB} GiB.", fix)
    return round(gpu_gib * 2**30)


def visible_gpus(visible: str | None, machine: Sequence[GpuInfo]) -> tuple[GpuInfo, ...]:
    """Return the GPUs that a process with this CUDA_VISIBLE_DEVICES sees, in its order and with its ids.

    Args:
        machine: all GPUs; empty if unknown: then every entry counts.
    """
    if visible is None:
        return tuple(machine)
    entries = visible_ids(visible)
    if not machine:
        return tuple(GpuInfo(id=entry) for entry in entries)
    found = (_find(entry, machine) for entry in entries)
    return tuple(gpu for gpu in takewhile(lambda gpu: gpu is not None, found) if gpu is not None)


def parse_gpus(listing: str) -> list[GpuInfo]:
    """Parse `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`; values in brackets ("[N/A]") become None."""
    gpus = []
    for line in listing.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 6 and parts[0].isdecimal():
            index, uuid, name, bus, total, free = (None if part.startswith("[") else part for part in parts)
            assert index is not None
            gpus.append(
                GpuInfo(
                    id=index,
                    uuid=uuid,
                    name=name,
                    pci_bus=bus,
                    numa_node=_numa_node(bus) if bus else None,
                    memory_total_mib=_number(total),
                    memory_free_mib=_number(free),
                )
            )
    return gpus


def with_processes(gpus: Sequence[GpuInfo], listing: str) -> list[GpuInfo]:
    """Add the processes of `nvidia-smi --query-compute-apps=gpu_uuid,pid` to the GPUs."""
    pids: dict[str, list[int]] = {}
    for line in listing.splitlines():
        uuid, _, pid = (part.strip() for part in line.partition(","))
        if pid.isdecimal():
            pids.setdefault(uuid, []).append(int(pid))
    return [replace(gpu, pids=tuple(pids.get(gpu.uuid or "", ()))) for gpu in gpus]


def _find(entry: str, machine: Sequence[GpuInfo]) -> GpuInfo | None:
    if entry.startswith("MIG-"):  # a slice of a GPU; --query-gpu does not list slices
        return GpuInfo(id=entry, uuid=entry)
    for gpu in machine:
        if gpu.id == entry or (entry.startswith("GPU-") and (gpu.uuid or "").startswith(entry)):
            return replace(gpu, id=entry)
    return None


def _numa_node(bus: str) -> int | None:
    """Return the NUMA node of a PCI address; None if unknown.

    nvidia-smi writes 00000000:18:00.0, the kernel 0000:18:00.0; the kernel reports -1 without NUMA.
    """
    file = _SYS / bus[-12:].lower() / "numa_node"
    try:
        node = int(file.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _query(query: str) -> str:
    try:
        return run_nvidia_smi(query, "--format=csv,noheader,nounits", timeout_s=_LIMIT_S)
    except SmiError as error:
        log.warning("%s. The GPUs of this machine are unknown", error)
        return ""
