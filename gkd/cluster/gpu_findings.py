"""Find problems of a GPU placement with pure rules. Each finding names the ranks and the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from gkd.cluster.gpu_table import TEACHER, Finding, GpuInfo, PoolNeed, RankPlacement
from teacher_server.wire.nvidia_smi import visible_ids

# An unused GPU has less memory than this allocated, by its driver.
IDLE_MIB = 1024

Device = str | tuple[str, str]  # UUID; without a driver: (node or host, id)


def find_problems(
    rows: Sequence[RankPlacement],
    pools: Sequence[PoolNeed],
    *,
    loaded: bool = False,
    gpus: Sequence[int] = (),
    teacher_gpu_share: float = 0.0,
) -> list[Finding]:
    """Return the problems of a placement, worst first.

    Args:
        rows: of the pools and of the teacher workers.
        loaded: the ranks already use their GPUs, so allocated memory is not evidence of other processes.
        gpus: cluster.gpus, the only GPUs that the pools may use; empty means all.
        teacher_gpu_share: cluster.teacher_gpu_share; above 0: the pools may use the teacher's GPUs.
    """
    needs = {pool.name: pool for pool in pools}
    ranks = [row for row in rows if row.pool in needs]
    teacher = [row for row in rows if row.pool == TEACHER]
    return [
        *_shared(ranks, needs),
        *([] if teacher_gpu_share else _overlaps(ranks, needs, teacher)),
        *_outside(ranks, gpus),
        *_too_few(ranks, pools),
        *_not_as_assigned(ranks),
        *_split_groups(ranks, pools),
        *_memory_taken(ranks, needs, teacher, loaded=loaded),
    ]


def used_gpus(row: RankPlacement, needs: Mapping[str, PoolNeed]) -> tuple[GpuInfo, ...]:
    """Return the GPUs that a rank uses: the first `gpus_per_rank` visible ones; all for a teacher worker.

    Without CUDA_VISIBLE_DEVICES and without a driver these are the GPUs that Ray assigned.
    """
    gpus = row.gpus
    if not gpus and row.cuda_visible_devices is None:
        gpus = tuple(GpuInfo(id=gpu) for gpu in row.ray_gpu_ids or ())
    return gpus[: needs[row.pool].gpus_per_rank] if row.pool in needs else gpus


def _by_device(
    rows: Sequence[RankPlacement], needs: Mapping[str, PoolNeed], place: Callable[[RankPlacement], str]
) -> dict[Device, list[RankPlacement]]:
    """Return the ranks that use each GPU; a rank that uses it twice is listed twice."""
    users: dict[Device, list[RankPlacement]] = {}
    for row in rows:
        for gpu in used_gpus(row, needs):
            users.setdefault(gpu.uuid or (place(row), gpu.id), []).append(row)
    return users


def _shared(ranks: Sequence[RankPlacement], needs: Mapping[str, PoolNeed]) -> Iterator[Finding]:
    # Group by Ray node, not by host: simulated nodes on one host have logical GPUs with the same ids.
    for device, users in _by_device(ranks, needs, lambda row: row.node or row.host).items():
        if len(users) > 1 and not _shared_by_config(users, needs):
            pools = {row.pool for row in users}
            seen = [row.cuda_visible_devices for row in ranks if row.pool in pools]
            yield Finding(
                kind="shared_gpu",
                ranks=_labels(users),
                problem=f"{_names(users)} use the same GPU, {_device(device)}; CUDA_VISIBLE_DEVICES of the ranks of "
                f"{' and '.join(sorted(pools))}: {seen}.",
                fix="start Ray, or without cluster.ray_address the trainer, with a CUDA_VISIBLE_DEVICES that names "
                "each GPU once, and without RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES.",
            )


def _shared_by_config(users: Sequence[RankPlacement], needs: Mapping[str, PoolNeed]) -> bool:
    """Return whether these are one rank of a pool and one of a pool that shares its GPUs by config."""
    pools = [row.pool for row in users]
    return len(pools) == 2 and any(needs[pool].shares_with in pools for pool in pools)


def _overlaps(
    ranks: Sequence[RankPlacement], needs: Mapping[str, PoolNeed], teacher: Sequence[RankPlacement]
) -> Iterator[Finding]:
    own = _by_device(ranks, needs, lambda row: row.host)
    for device, workers in _by_device(teacher, needs, lambda row: row.host).items():
        if users := own.get(device):
            yield Finding(
                kind="teacher_overlap",
                ranks=(*_labels(users), *_labels(workers)),
                problem=f"{_names(users)} on {users[0].host} use a GPU of the teacher, {_device(device)} "
                f"({_names(workers)}).",
                fix="set other GPUs for the teacher (its --gpus) or for the trainer (cluster.gpus), or state the "
                "teacher's share of them in cluster.teacher_gpu_share.",
            )


def _outside(ranks: Sequence[RankPlacement], gpus: Sequence[int]) -> Iterator[Finding]:
    allowed = set(map(str, gpus))
    others = [row for row in ranks if allowed and row.ray_gpu_ids and not allowed.issuperset(row.ray_gpu_ids)]
    if others:
        hosts = ", ".join(dict.fromkeys(row.host for row in others))
        given = "; ".join(f"{row.label}: {_ids(row)}" for row in others)
        shown = ",".join(map(str, gpus))
        yield Finding(
            kind="outside_gpus",
            ranks=_labels(others),
            problem=f"Ray assigned GPUs that are not in cluster.gpus [{shown}], on {hosts} ({given}).",
            fix=f"start Ray on each node with only these: CUDA_VISIBLE_DEVICES={shown} ray start ...; or change "
            "cluster.gpus.",
        )


def _too_few(ranks: Sequence[RankPlacement], pools: Sequence[PoolNeed]) -> Iterator[Finding]:
    for pool in pools:
        mine = [row for row in ranks if row.pool == pool.name]
        # Without CUDA_VISIBLE_DEVICES and without a driver, the visible GPUs are unknown.
        known = [row for row in mine if row.gpus or row.cuda_visible_devices is not None]
        if short := [row for row in known if len(row.gpus) < pool.gpus_per_rank]:
            sees = ", ".join(f"{row.label} sees {len(row.gpus)} ({row.cuda_visible_devices!r})" for row in short)
            yield Finding(
                kind="too_few_gpus",
                ranks=_labels(short),
                problem=f"each rank of {pool.name} requires {pool.gpus_per_rank} GPUs: {sees}.",
                fix="start Ray with a CUDA_VISIBLE_DEVICES that names existing GPUs, or lower the pool's "
                "n_gpus_per_node.",
            )
        if len(mine) < pool.n_ranks:
            yield Finding(
                kind="too_few_gpus",
                ranks=(),
                problem=f"{pool.name} requires {pool.n_ranks} ranks with {pool.gpus_per_rank} GPUs each, but has "
                f"{len(mine)}.",
                fix="lower the pool's n_gpus_per_node or nnodes, or add GPUs.",
            )


def _not_as_assigned(ranks: Sequence[RankPlacement]) -> Iterator[Finding]:
    given = [row for row in ranks if row.ray_gpu_ids]
    if unset := [row for row in given if row.cuda_visible_devices is None]:
        yield Finding(
            kind="unset",
            ranks=_labels(unset),
            problem=f"CUDA_VISIBLE_DEVICES is not set for {_names(unset)}: they see every GPU of their machine, and "
            "each uses the first one.",
            fix="unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES where Ray is started, so that Ray sets it.",
        )
    others = [
        row
        for row in given
        if row.cuda_visible_devices is not None and visible_ids(row.cuda_visible_devices) != row.ray_gpu_ids
    ]
    if others:
        pairs = "; ".join(f"{row.label}: {row.cuda_visible_devices!r}, Ray assigned {_ids(row)!r}" for row in others)
        yield Finding(
            kind="reordered",
            ranks=_labels(others),
            problem=f"CUDA_VISIBLE_DEVICES differs from the GPUs that Ray assigned, or from their order ({pairs}).",
            fix="let Ray set it: unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, and do not set "
            "CUDA_VISIBLE_DEVICES in the environment of the workers.",
        )


def _split_groups(ranks: Sequence[RankPlacement], pools: Sequence[PoolNeed]) -> Iterator[Finding]:
    for pool in pools:
        groups: dict[int, list[RankPlacement]] = {}
        for row in ranks:
            if row.pool == pool.name:
                groups.setdefault(row.rank // pool.tp, []).append(row)
        for group in groups.values():
            if len({row.node or row.host for row in group}) > 1:
                where = ", ".join(f"{row.label} on {row.host} ({row.node[:8]})" for row in group)
                yield Finding(
                    kind="split_tp_group",
                    ranks=_labels(group),
                    problem=f"one tensor-parallel group spans several nodes: {where}.",
                    fix=f"choose a tp that divides the pool's n_gpus_per_node; tp is {pool.tp}.",
                )


def _memory_taken(
    ranks: Sequence[RankPlacement], needs: Mapping[str, PoolNeed], teacher: Sequence[RankPlacement], *, loaded: bool
) -> Iterator[Finding]:
    ours = {(row.host, row.pid) for row in (*ranks, *teacher)}
    teacher_gpus = _by_device(teacher, needs, lambda row: row.host)
    for row in ranks:
        for gpu in used_gpus(row, needs):
            others = [pid for pid in gpu.pids if (row.host, pid) not in ours]
            taken_mib = (gpu.memory_total_mib or 0) - (gpu.memory_free_mib or 0)
            if gpu.memory_total_mib is None or gpu.memory_free_mib is None or loaded:
                taken_mib = 0
            if (gpu.uuid or (row.host, gpu.id)) in teacher_gpus or not (others or taken_mib > IDLE_MIB):
                continue
            who = f"process {', '.join(map(str, others))}" if others else "an unknown process (another container?)"
            much = f" {taken_mib / 1024:.1f} GiB of" if taken_mib else ""
            yield Finding(
                kind="memory_taken",
                ranks=(row.label,),
                problem=f"{who} holds{much} GPU {gpu.id} ({gpu.uuid}) on {row.host}, which {row.label} uses.",
                fix=f"end the process (see nvidia-smi on {row.host}), or exclude this GPU with cluster.gpus.",
            )


def _labels(rows: Sequence[RankPlacement]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.label for row in rows))


def _names(rows: Sequence[RankPlacement]) -> str:
    counts = {label: sum(row.label == label for row in rows) for label in _labels(rows)}
    return ", ".join(label if count == 1 else f"{label} ({count} times)" for label, count in counts.items())


def _ids(row: RankPlacement) -> str:
    return ",".join(row.ray_gpu_ids or ())


def _device(device: Device) -> str:
    return device if isinstance(device, str) else f"number {device[1]}"
