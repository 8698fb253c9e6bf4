"""List the GPUs of this machine with `nvidia-smi`, in bounded time and without a CUDA context."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from gkd.cluster.gpu_table import GpuInfo
from gkd.errors import ConfigError
from gkd.log import get_logger
from teacher_server.wire.machine import SmiError, run_nvidia_smi, visible_ids

log = get_logger("gpus")

_LIMIT_S = 10.0
_GPUS = "--query-gpu=index,uuid,name,pci.bus_id,memory.total,memory.free"
_PROCESSES = "--query-compute-apps=gpu_uuid,pid"


def machine_gpus() -> list[GpuInfo]:
    """Return all GPUs; empty if `nvidia-smi` is missing, may not be run, or fails (a failure is logged)."""
    listed = _query(_GPUS)
    return parse_gpus(listed, _query(_PROCESSES)) if listed else []


def driver_version() -> str | None:
    """Return the version of the GPU driver, or None if it is unknown, as for `machine_gpus`."""
    return next(iter(_query("--query-gpu=driver_version").split()), None)


def gpu_memory_bytes(gpu_gib: float | None) -> int | None:
    """Return the bytes per GPU that a tool plans with: of --gpu-gib (ConfigError: not a size), or the smallest here."""
    if gpu_gib is None:
        sizes = [gpu.memory_total_mib for gpu in machine_gpus() if gpu.memory_total_mib]
        return min(sizes) << 20 if sizes else None
    if not 0 < gpu_gib < float("inf"):  # NaN is refused, too
        raise ConfigError("--gpu-gib", gpu_gib, "not a size.", "give the GPU's memory in GiB, for example 80.")
    return round(gpu_gib * 2**30)


def visible_gpus(visible: str | None, machine: Sequence[GpuInfo]) -> tuple[GpuInfo, ...]:
    """Return the GPUs that a process with this CUDA_VISIBLE_DEVICES sees, in its order and with its ids.

    If the machine's GPUs are unknown, every entry counts.
    """
    if visible is None:
        return tuple(machine)
    gpus = []
    for entry in visible_ids(visible):
        matching = [gpu for gpu in machine if gpu.id == entry or (gpu.uuid or "").startswith(entry)]
        if entry.startswith("MIG-") or not machine:  # the list has no slices of GPUs
            matching = [GpuInfo(id=entry, uuid=entry if machine else None)]
        if not matching:
            break  # CUDA stops at the first id without a GPU
        gpus.append(structs.replace(matching[0], id=entry))
    return tuple(gpus)


def parse_gpus(listing: str, processes: str = "") -> list[GpuInfo]:
    """Parse the CSV of `nvidia-smi` for `_GPUS` and `_PROCESSES`; a memory of "[N/A]" becomes None."""
    running = [line.partition(", ")[::2] for line in processes.splitlines()]
    gpus = []
    for line in listing.splitlines():
        fields = line.split(", ")
        if len(fields) == 6:
            index, uuid, name, bus, *mib = fields
            total, free = (int(size) if size.isdecimal() else None for size in mib)
            pids = tuple(int(pid) for where, pid in running if where == uuid and pid.isdecimal())
            sizes = {"memory_total_mib": total, "memory_free_mib": free}
            gpus.append(GpuInfo(id=index, uuid=uuid, name=name, pci_bus=bus, pids=pids, **sizes))
    return gpus


def _query(query: str) -> str:
    try:
        return run_nvidia_smi(query, "--format=csv,noheader,nounits", timeout_s=_LIMIT_S)
    except SmiError as error:
        log.warning("%s. The GPUs of this machine are unknown", error)
        return ""
