"""Find the GPUs of this machine, assign them to the workers, and describe the GPUs of a worker.

    --gpus 4,5,6,7 --tensor-parallel-size 2   ->   worker 0: 4,5    worker 1: 6,7

On cpu the ids are only labels; they are assigned in the same way. Pure except for `find_gpus`, which queries the
driver, and `own_gpus`, which queries torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from teacher_server.config.schema import ServerSettings, TeacherSettings
from teacher_server.errors import SettingsError
from teacher_server.wire.machine import SmiError, SmiTimeout, run_nvidia_smi, visible_ids
from teacher_server.wire.status import Gpu

_NVIDIA_SMI_S = 20.0  # it may first have to start the driver


@dataclass(frozen=True, slots=True)
class FoundGpus:
    """GPUs this process may use."""

    ids: tuple[str, ...]
    source: str  # origin of the list, for errors; empty means the GPUs are unknown
    uuids: Mapping[str, str]  # number -> UUID, for ids that are numbers

    def same_as(self, gpu: str) -> str:
        """Return one name per device: its UUID if the driver reports it."""
        return self.uuids.get(gpu, gpu)


NO_GPUS = FoundGpus((), "", {})  # no GPUs, or the driver was not queried


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker to start: a teacher (its device no longer `auto`) and the GPUs of one model copy."""

    teacher: TeacherSettings
    gpus: tuple[str, ...]


def may_need_gpus(settings: ServerSettings) -> bool:
    """Return whether the driver, which may be stuck, has to be queried."""
    return any(teacher.n_workers != 0 and teacher.device != "cpu" for teacher in settings.teachers)


def find_gpus(environment: Mapping[str, str]) -> FoundGpus:
    """Return CUDA_VISIBLE_DEVICES if it is set, else the list of `nvidia-smi -L` (MIG slices instead of their GPU).

    Raises:
        SettingsError: the program did not finish in time.
    """
    try:
        listing = run_nvidia_smi("-L", timeout_s=_NVIDIA_SMI_S)
    except SmiTimeout as error:
        raise SettingsError(f"{error}. Fix: --device cpu, or repair the driver.") from error
    except SmiError:  # installed, but without a driver: no GPU
        listing = ""
    numbers, uuids = parse_nvidia_smi(listing)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return FoundGpus(tuple(numbers), "nvidia-smi" if numbers else "", uuids)
    return FoundGpus(visible_ids(visible), f"CUDA_VISIBLE_DEVICES={visible}", uuids)


def parse_nvidia_smi(listing: str) -> tuple[list[str], dict[str, str]]:
    """Return (ids to use, {number: UUID}) from the output of `nvidia-smi -L`."""
    ids: list[str] = []
    uuids: dict[str, str] = {}
    number = ""
    for line in listing.splitlines():
        if gpu := re.match(r"GPU (\d+): .*\(UUID: (GPU-[^)]+)\)", line):
            number = gpu[1]
            ids.append(number)
            uuids[number] = gpu[2]
        elif mig := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line):
            if number in ids:  # CUDA cannot use a whole GPU that has MIG devices
                ids.remove(number)
            ids.append(mig[1])
    return ids, uuids


def plan_workers(settings: ServerSettings, available: FoundGpus) -> list[WorkerPlan]:
    """Return every worker that the server starts, teacher by teacher.

    Raises:
        SettingsError: GPUs do not exist, are named twice, or cannot be divided into groups.
    """
    starting = [
        replace(teacher, device=_device(teacher, available, (teacher.gpus or settings.gpus) is not None))
        for teacher in settings.teachers
        if teacher.n_workers != 0
    ]
    shares = _shares(settings, starting, available)
    plans = [plan for teacher in starting for plan in _groups(teacher, shares[teacher.name])]
    _check_distinct(plans, available, settings.share_gpus)
    return plans


def _device(teacher: TeacherSettings, available: FoundGpus, gpus_chosen: bool) -> str:
    if teacher.device != "auto":
        return teacher.device
    if gpus_chosen and not available.ids:
        raise SettingsError("--gpus: no GPU found here. Fix: --device cuda if there are GPUs, else --device cpu.")
    return "cuda" if available.ids else "cpu"


def _shares(
    settings: ServerSettings, teachers: Sequence[TeacherSettings], available: FoundGpus
) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Return {teacher: (its GPUs, whether the settings name them)}."""
    with_own = [teacher for teacher in teachers if teacher.gpus is not None]
    if with_own and len(with_own) < len(teachers):
        without = next(teacher.name for teacher in teachers if teacher.gpus is None)
        raise SettingsError(
            f"teachers.{with_own[0].name}.gpus: teacher {without} has no `gpus`. Fix: set `gpus` for every teacher, "
            "or for none."
        )
    shares = {teacher.name: (tuple(teacher.gpus), True) for teacher in teachers if teacher.gpus is not None}
    # On CPU the ids are labels. If any teacher uses real GPUs, CPU teachers get none of them.
    device = "cuda" if any(teacher.device == "cuda" for teacher in teachers) else "cpu"
    if not with_own:
        shares = {teacher.name: ((), False) for teacher in teachers}
        receivers = [teacher for teacher in teachers if teacher.device == device]
        gpus = tuple(settings.gpus) if settings.gpus is not None else available.ids if device == "cuda" else ()
        if receivers and len(gpus) % len(receivers):
            raise SettingsError(
                f"--gpus: {len(gpus)} GPUs cannot be divided evenly among {len(receivers)} teachers. Fix: write `gpus` "
                "for each under `teachers:` of a --config file."
            )
        for index, teacher in enumerate(receivers):
            n = len(gpus) // len(receivers)
            shares[teacher.name] = gpus[index * n : (index + 1) * n], settings.gpus is not None
    for teacher in teachers:
        gpus = shares[teacher.name][0]
        for gpu in gpus if teacher.device == "cuda" and available.source else ():
            if available.same_as(gpu) not in {available.same_as(other) for other in available.ids}:
                here = ",".join(available.ids) or "none"
                raise SettingsError(f"--gpus: GPU {gpu} is not available here ({available.source}: {here}).")
    return shares


def _groups(teacher: TeacherSettings, share: tuple[tuple[str, ...], bool]) -> list[WorkerPlan]:
    gpus, chosen = share
    size = teacher.tensor_parallel_size
    where = f"teacher {teacher.name}: {len(gpus)} GPUs"
    if size > 1 and teacher.device == "cpu" and teacher.engine == "auto":
        problem = f"--tensor-parallel-size {size} on the CPU (teacher {teacher.name}): --engine auto is hf there"
        raise SettingsError(f"{problem}, and only vllm splits a model. Fix: --engine vllm, or leave the size out.")
    if teacher.device == "cpu" and not gpus:
        return [WorkerPlan(teacher, ()) for _ in range(1 if teacher.n_workers is None else teacher.n_workers)]
    if not gpus:
        raise SettingsError(f"{where} with --device cuda. Fix: --device cpu, or check nvidia-smi -L.")
    if size > 1 and any(gpu.startswith("MIG-") for gpu in gpus):
        raise SettingsError(
            f"{where}, some of them MIG slices: a process can use only one. Fix: --tensor-parallel-size 1."
        )
    n_workers = len(gpus) // size if teacher.n_workers is None else teacher.n_workers
    if n_workers == 0 or n_workers * size > len(gpus) or (chosen and n_workers * size != len(gpus)):
        raise SettingsError(
            f"{where} cannot form {max(n_workers, 1)} groups of --tensor-parallel-size {size}. Fix: change --gpus, "
            "--tensor-parallel-size or --n-workers."
        )
    if teacher.n_workers is None and len(gpus) % size:
        raise SettingsError(
            f"{where} are not divisible by --tensor-parallel-size {size}. Fix: choose with --gpus or --n-workers."
        )
    return [WorkerPlan(teacher, gpus[index * size : (index + 1) * size]) for index in range(n_workers)]


def _check_distinct(plans: Sequence[WorkerPlan], available: FoundGpus, share_gpus: bool) -> None:
    """Raise SettingsError if two model copies share a GPU: one would run out of memory after minutes of loading."""
    holders: dict[str, set[str]] = {}  # device -> teachers
    for plan in plans:
        for gpu in plan.gpus:
            names = holders.setdefault(available.same_as(gpu), set())
            if plan.teacher.name in names:
                raise SettingsError(f"--gpus: GPU {gpu} is named twice (teacher {plan.teacher.name}).")
            if names and not share_gpus:
                raise SettingsError(
                    f"GPU {gpu} is assigned to both {', '.join(names)} and {plan.teacher.name}. Fix: choose other "
                    "`gpus`, or `share_gpus: true` in the --config file and a smaller gpu_memory_utilization."
                )
            names.add(plan.teacher.name)


def own_gpus(device: str, labels: Sequence[str], visible: str | None, tensor_parallel_size: int = 1) -> list[Gpu]:
    """Return the devices of this process. Call it after its engine has loaded.

    Args:
        device: of the engine; any other than cuda has only `labels`.
        labels: ids from --gpus; empty means the engine uses the first `tensor_parallel_size` visible GPUs.
        visible: CUDA_VISIBLE_DEVICES; gives the ids as the user wrote them.
    """
    if not device.startswith("cuda"):
        return [Gpu(id=label) for label in labels]
    import torch

    names = visible_ids(visible) if visible else [str(index) for index in range(torch.cuda.device_count())]
    gpus = []
    for index in range(len(labels) or tensor_parallel_size):
        properties = torch.cuda.get_device_properties(index)
        prefix = "MIG-" if names[index].startswith("MIG-") else "GPU-"
        gpus.append(Gpu(id=names[index], uuid=f"{prefix}{properties.uuid}", name=properties.name))
    return gpus
