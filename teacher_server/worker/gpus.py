"""Which GPUs are here, which worker gets which, and what a worker tells about its own.

    --gpus 4,5,6,7 --tensor-parallel-size 2   ->   worker 0: 4,5    worker 1: 6,7

On cpu the ids are labels without a device behind them: the dealing is the same. Pure but for
`find_gpus`, which asks the driver, and `own_gpus`, which asks torch.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from teacher_server.config.schema import ServerSettings, TeacherSettings
from teacher_server.errors import SettingsError
from teacher_server.wire.status import Gpu

_NVIDIA_SMI_S = 20.0  # it may first have to start the driver


@dataclass(frozen=True, slots=True)
class FoundGpus:
    """GPUs this process may use."""

    ids: tuple[str, ...]
    source: str  # for errors: where the list is from; empty: nothing says what is here
    uuids: Mapping[str, str]  # of ids that are numbers

    def same_as(self, gpu: str) -> str:
        """One name for one device: its UUID if the driver says it."""
        return self.uuids.get(gpu, gpu)


NO_GPUS = FoundGpus((), "", {})  # also where nobody looked


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker to start: a teacher (its device no longer `auto`) and the GPUs of one model copy."""

    teacher: TeacherSettings
    gpus: tuple[str, ...]


def may_need_gpus(settings: ServerSettings) -> bool:
    """Whether it is worth asking a driver, which may be stuck, what is here."""
    return any(
        teacher.n_workers != 0 and teacher.device != "cpu" and teacher.engine != "trivial"
        for teacher in settings.teachers
    )


def find_gpus(environment: Mapping[str, str]) -> FoundGpus:
    """CUDA_VISIBLE_DEVICES if it is set, else what `nvidia-smi -L` lists; a card cut by MIG counts as its parts."""
    numbers, uuids = parse_nvidia_smi(_ask_nvidia_smi())
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return FoundGpus(tuple(numbers), "nvidia-smi" if numbers else "", uuids)
    return FoundGpus(_visible_ids(visible), f"CUDA_VISIBLE_DEVICES={visible}", uuids)


def _visible_ids(visible: str) -> tuple[str, ...]:
    ids = [part.strip() for part in visible.split(",")]
    return tuple(itertools.takewhile(lambda gpu: gpu not in ("", "-1"), ids))  # CUDA stops reading there, too


def _ask_nvidia_smi() -> str:
    """Its list; empty where there is no such program, none that we may run, or no driver."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=False)
    except (FileNotFoundError, PermissionError):
        return ""
    except subprocess.TimeoutExpired as error:
        raise SettingsError(
            f"nvidia-smi -L does not answer within {_NVIDIA_SMI_S:.0f} s: is the driver stuck? Fix: --device cpu, or "
            "repair it."
        ) from error
    return done.stdout if done.returncode == 0 else ""


def parse_nvidia_smi(listing: str) -> tuple[list[str], dict[str, str]]:
    """(ids to use, {number: UUID}) of the output of `nvidia-smi -L`."""
    ids: list[str] = []
    uuids: dict[str, str] = {}
    number = ""
    for line in listing.splitlines():
        if card := re.match(r"GPU (\d+): .*\(UUID: (GPU-[^)]+)\)", line):
            number = card[1]
            ids.append(number)
            uuids[number] = card[2]
        elif part := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line):
            if number in ids:  # CUDA cannot use the whole card any more
                ids.remove(number)
            ids.append(part[1])
    return ids, uuids


def plan_workers(settings: ServerSettings, found: FoundGpus) -> list[WorkerPlan]:
    """Every worker that the server starts, teacher by teacher.

    Raises:
        SettingsError: GPUs that are not there, named twice, or not divisible into groups.
    """
    starting = [
        replace(teacher, device=_device(teacher, found, (teacher.gpus or settings.gpus) is not None))
        for teacher in settings.teachers
        if teacher.n_workers != 0
    ]
    shares = _shares(settings, starting, found)
    plans = [plan for teacher in starting for plan in _groups(teacher, shares[teacher.name])]
    _check_distinct(plans, found, settings.share_gpus)
    return plans


def _device(teacher: TeacherSettings, found: FoundGpus, gpus_chosen: bool) -> str:
    if teacher.engine == "trivial":
        return "cpu"
    if teacher.device != "auto":
        return teacher.device
    if gpus_chosen and not found.ids:
        raise SettingsError("--gpus: no GPU found here. Fix: say --device cuda if there are, or --device cpu.")
    return "cuda" if found.ids else "cpu"


def _shares(
    settings: ServerSettings, teachers: Sequence[TeacherSettings], found: FoundGpus
) -> dict[str, tuple[tuple[str, ...], bool]]:
    """{teacher: (its GPUs, whether somebody chose them)}"""
    with_own = [teacher for teacher in teachers if teacher.gpus is not None]
    if with_own and len(with_own) < len(teachers):
        without = next(teacher.name for teacher in teachers if teacher.gpus is None)
        raise SettingsError(
            f"teachers.{with_own[0].name}.gpus: teacher {without} has none of its own. Fix: give every teacher `gpus`, "
            "or none of them."
        )
    shares = {teacher.name: (teacher.gpus, True) for teacher in teachers if teacher.gpus is not None}
    # On a CPU the ids are labels; beside a teacher that has real GPUs they are not for who has none.
    device = "cuda" if any(teacher.device == "cuda" for teacher in teachers) else "cpu"
    if not with_own:
        shares = {teacher.name: ((), False) for teacher in teachers}
        takers = [teacher for teacher in teachers if teacher.device == device]
        gpus = settings.gpus if settings.gpus is not None else found.ids if device == "cuda" else ()
        if takers and len(gpus) % len(takers):
            raise SettingsError(
                f"--gpus: {len(gpus)} GPUs cannot be dealt evenly to {len(takers)} teachers. Fix: write `gpus` for "
                "each under `teachers:` of a --config file."
            )
        for index, teacher in enumerate(takers):
            n = len(gpus) // len(takers)
            shares[teacher.name] = gpus[index * n : (index + 1) * n], settings.gpus is not None
    for teacher in teachers:
        gpus = shares[teacher.name][0]
        for gpu in gpus if teacher.device == "cuda" and found.source else ():
            if found.same_as(gpu) not in {found.same_as(other) for other in found.ids}:
                here = ",".join(found.ids) or "none"
                raise SettingsError(f"--gpus: GPU {gpu} is not among those here ({found.source}: {here}).")
    return shares


def _groups(teacher: TeacherSettings, share: tuple[tuple[str, ...], bool]) -> list[WorkerPlan]:
    gpus, chosen = share
    size = teacher.tensor_parallel_size
    where = f"teacher {teacher.name}: {len(gpus)} GPUs"
    if teacher.device == "cpu" and not gpus:
        return [WorkerPlan(teacher, ()) for _ in range(1 if teacher.n_workers is None else teacher.n_workers)]
    if not gpus:
        raise SettingsError(f"{where} with --device cuda. Fix: --device cpu, or look at what nvidia-smi -L says.")
    if size > 1 and any(gpu.startswith("MIG-") for gpu in gpus):
        raise SettingsError(f"{where}, some of them MIG: a process sees one of these. Fix: --tensor-parallel-size 1.")
    n_workers = len(gpus) // size if teacher.n_workers is None else teacher.n_workers
    if n_workers == 0 or n_workers * size > len(gpus) or (chosen and n_workers * size != len(gpus)):
        raise SettingsError(
            f"{where} are not {max(n_workers, 1)} groups of --tensor-parallel-size {size}. Fix: change --gpus, "
            "--tensor-parallel-size or --n-workers."
        )
    if teacher.n_workers is None and len(gpus) % size:
        raise SettingsError(
            f"{where} are not divisible by --tensor-parallel-size {size}. Fix: choose with --gpus or --n-workers."
        )
    return [WorkerPlan(teacher, gpus[index * size : (index + 1) * size]) for index in range(n_workers)]


def _check_distinct(plans: Sequence[WorkerPlan], found: FoundGpus, share_gpus: bool) -> None:
    """Two model copies on one GPU run out of its memory, one of them after minutes of loading."""
    holders: dict[str, set[str]] = {}  # device -> teachers
    for plan in plans:
        for gpu in plan.gpus:
            others = holders.setdefault(found.same_as(gpu), set())
            if plan.teacher.name in others:
                raise SettingsError(f"--gpus: GPU {gpu} is named twice (teacher {plan.teacher.name}).")
            if others and not share_gpus:
                raise SettingsError(
                    f"GPU {gpu} is given to both {', '.join(others)} and {plan.teacher.name}. Fix: other `gpus`, "
                    "or `share_gpus: true` in the --config file and a gpu_memory_utilization that leaves room."
                )
            others.add(plan.teacher.name)


def own_gpus(device: str, labels: Sequence[str], visible: str | None, tensor_parallel_size: int = 1) -> list[Gpu]:
    """The devices of this process, after its engine has loaded.

    Args:
        device: of the engine; anything but cuda has no devices, only `labels`.
        labels: of --gpus; empty: it took the first `tensor_parallel_size` that it sees.
        visible: CUDA_VISIBLE_DEVICES, which says how the user names them.
    """
    if not device.startswith("cuda"):
        return [Gpu(id=label) for label in labels]
    import torch

    names = _visible_ids(visible) if visible else [str(index) for index in range(torch.cuda.device_count())]
    gpus = []
    for index in range(len(labels) or tensor_parallel_size):
        properties = torch.cuda.get_device_properties(index)
        prefix = "MIG-" if names[index].startswith("MIG-") else "GPU-"
        gpus.append(Gpu(id=names[index], uuid=f"{prefix}{properties.uuid}", name=properties.name))
    return gpus
