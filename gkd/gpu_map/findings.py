"""What is wrong with a table of ranks and GPUs: pure rules, each of which names the ranks and the fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gkd.cluster.gpu_table import TEACHER, Card, Finding, PoolNeed, RankPlace, visible_ids

# A card that nobody uses has less than this taken, by its driver.
IDLE_MIB = 1024

Device = str | tuple[str, str]  # UUID, or where no driver tells one: node or host, and id


def judge(
    rows: Sequence[RankPlace], pools: Sequence[PoolNeed], *, loaded: bool = False, gpus: Sequence[int] = ()
) -> list[Finding]:
    """All that is wrong, worst first; empty: nothing is.

    Args:
        rows: of the pools and of the teacher's workers.
        loaded: the ranks have begun to use their GPUs, so that memory taken says nothing about others.
        gpus: cluster.gpus, the only ones that the pools may use; empty: all.
    """
    needs = {pool.name: pool for pool in pools}
    ranks = [row for row in rows if row.pool in needs]
    teacher = [row for row in rows if row.pool == TEACHER]
    return [
        *_shared(ranks, needs),
        *_overlaps(ranks, needs, teacher),
        *_outside(ranks, gpus),
        *_too_few(ranks, pools),
        *_not_as_ray_says(ranks),
        *_split_groups(ranks, pools),
        *_memory_taken(ranks, needs, teacher, loaded=loaded),
    ]


def used_cards(row: RankPlace, needs: Mapping[str, PoolNeed]) -> tuple[Card, ...]:
    """The GPUs a rank works on: the first it sees, as many as it was promised; of a teacher's worker all.

    Where it has no CUDA_VISIBLE_DEVICES and no driver tells what there is: those that Ray gave it.
    """
    cards = row.cards
    if not cards and row.cuda_visible_devices is None:
        cards = tuple(Card(id=gpu) for gpu in row.ray_gpu_ids or ())
    return cards[: needs[row.pool].gpus_per_rank] if row.pool in needs else cards


def _by_device(
    rows: Sequence[RankPlace], needs: Mapping[str, PoolNeed], place: Callable[[RankPlace], str]
) -> dict[Device, list[RankPlace]]:
    """Who works on each; twice in the list if twice on it."""
    users: dict[Device, list[RankPlace]] = {}
    for row in rows:
        for card in used_cards(row, needs):
            users.setdefault(card.uuid or (place(row), card.id), []).append(row)
    return users


def _shared(ranks: Sequence[RankPlace], needs: Mapping[str, PoolNeed]) -> list[Finding]:
    # By Ray's node and not by host: nodes that are simulated on one host have logical GPUs of the same ids.
    found = []
    for device, users in _by_device(ranks, needs, lambda row: row.node or row.host).items():
        if len(users) > 1 and not _meant_to(users, needs):
            pools = {row.pool for row in users}
            seen = [row.cuda_visible_devices for row in ranks if row.pool in pools]
            found.append(
                Finding(
                    kind="shared_gpu",
                    ranks=_labels(users),
                    problem=f"{_names(users)} work on one GPU, {_device(device)}; CUDA_VISIBLE_DEVICES of the ranks of "
                    f"{' and '.join(sorted(pools))}: {seen}.",
                    fix="start Ray, or without cluster.ray_address the trainer, with a CUDA_VISIBLE_DEVICES that names "
                    "each GPU once, and without RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES.",
                )
            )
    return found


def _meant_to(users: Sequence[RankPlace], needs: Mapping[str, PoolNeed]) -> bool:
    """One rank of a pool and one of a pool that shares its GPUs."""
    pools = [row.pool for row in users]
    return len(pools) == 2 and any(needs[pool].shares_with in pools for pool in pools)


def _overlaps(ranks: Sequence[RankPlace], needs: Mapping[str, PoolNeed], teacher: Sequence[RankPlace]) -> list[Finding]:
    own = _by_device(ranks, needs, lambda row: row.host)
    found = []
    for device, workers in _by_device(teacher, needs, lambda row: row.host).items():
        if users := own.get(device):
            found.append(
                Finding(
                    kind="teacher_overlap",
                    ranks=(*_labels(users), *_labels(workers)),
                    problem=f"{_names(users)} on {users[0].host} work on a GPU of the teacher's, {_device(device)} "
                    f"({_names(workers)}).",
                    fix="give the teacher other GPUs with its --gpus, or the trainer others with cluster.gpus.",
                )
            )
    return found


def _outside(ranks: Sequence[RankPlace], gpus: Sequence[int]) -> list[Finding]:
    allowed = set(map(str, gpus))
    others = [row for row in ranks if allowed and row.ray_gpu_ids and not allowed.issuperset(row.ray_gpu_ids)]
    if not others:
        return []
    hosts = ", ".join(dict.fromkeys(row.host for row in others))
    given = "; ".join(f"{row.label}: {_ids(row)}" for row in others)
    shown = ",".join(map(str, gpus))
    return [
        Finding(
            kind="outside_gpus",
            ranks=_labels(others),
            problem=f"Ray gave GPUs that are not in cluster.gpus [{shown}], on {hosts} ({given}).",
            fix=f"start Ray on each node with them alone: CUDA_VISIBLE_DEVICES={shown} ray start ...; or change "
            "cluster.gpus.",
        )
    ]


def _too_few(ranks: Sequence[RankPlace], pools: Sequence[PoolNeed]) -> list[Finding]:
    found = []
    for pool in pools:
        mine = [row for row in ranks if row.pool == pool.name]
        # With no CUDA_VISIBLE_DEVICES and no driver nobody knows what it sees.
        known = [row for row in mine if row.cards or row.cuda_visible_devices is not None]
        poor = [row for row in known if len(row.cards) < pool.gpus_per_rank]
        if poor:
            sees = ", ".join(f"{row.label} sees {len(row.cards)} ({row.cuda_visible_devices!r})" for row in poor)
            found.append(
                Finding(
                    kind="too_few_gpus",
                    ranks=_labels(poor),
                    problem=f"each rank of {pool.name} wants {pool.gpus_per_rank} GPUs: {sees}.",
                    fix="name GPUs that are there in the CUDA_VISIBLE_DEVICES that Ray is started with, or lower the "
                    "pool's n_gpus_per_node.",
                )
            )
        if len(mine) < pool.n_ranks:
            found.append(
                Finding(
                    kind="too_few_gpus",
                    ranks=(),
                    problem=f"{pool.name} wants {pool.n_ranks} ranks of {pool.gpus_per_rank} GPUs, and there are "
                    f"{len(mine)}.",
                    fix="lower the pool's n_gpus_per_node or nnodes, or add GPUs.",
                )
            )
    return found


def _not_as_ray_says(ranks: Sequence[RankPlace]) -> list[Finding]:
    given = [row for row in ranks if row.ray_gpu_ids]
    unset = [row for row in given if row.cuda_visible_devices is None]
    others = [
        row
        for row in given
        if row.cuda_visible_devices is not None and visible_ids(row.cuda_visible_devices) != row.ray_gpu_ids
    ]
    found = []
    if unset:
        found.append(
            Finding(
                kind="unset",
                ranks=_labels(unset),
                problem=f"CUDA_VISIBLE_DEVICES is not set for {_names(unset)}: they see every GPU of their machine, "
                "and each begins with the first.",
                fix="unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES where Ray is started, so that Ray sets it.",
            )
        )
    if others:
        pairs = "; ".join(f"{row.label}: {row.cuda_visible_devices!r}, Ray gave {_ids(row)!r}" for row in others)
        found.append(
            Finding(
                kind="reordered",
                ranks=_labels(others),
                problem=f"CUDA_VISIBLE_DEVICES names other GPUs than Ray gave, or in another order ({pairs}).",
                fix="let Ray set it: unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, and take CUDA_VISIBLE_DEVICES "
                "out of what sets the workers' environment.",
            )
        )
    return found


def _split_groups(ranks: Sequence[RankPlace], pools: Sequence[PoolNeed]) -> list[Finding]:
    found = []
    for pool in pools:
        groups: dict[int, list[RankPlace]] = {}
        for row in ranks:
            if row.pool == pool.name:
                groups.setdefault(row.rank // pool.tp, []).append(row)
        for group in groups.values():
            if len({row.node or row.host for row in group}) > 1:
                where = ", ".join(f"{row.label} on {row.host} ({row.node[:8]})" for row in group)
                found.append(
                    Finding(
                        kind="split_tp_group",
                        ranks=_labels(group),
                        problem=f"one tensor-parallel group sits on different nodes: {where}.",
                        fix=f"choose a tp that divides the pool's n_gpus_per_node; tp is {pool.tp}.",
                    )
                )
    return found


def _memory_taken(
    ranks: Sequence[RankPlace], needs: Mapping[str, PoolNeed], teacher: Sequence[RankPlace], *, loaded: bool
) -> list[Finding]:
    ours = {(row.host, row.pid) for row in (*ranks, *teacher)}
    the_teachers = _by_device(teacher, needs, lambda row: row.host)
    found = []
    for row in ranks:
        for card in used_cards(row, needs):
            strangers = [pid for pid in card.pids if (row.host, pid) not in ours]
            taken_mib = (card.memory_total_mib or 0) - (card.memory_free_mib or 0)
            if card.memory_total_mib is None or card.memory_free_mib is None or loaded:
                taken_mib = 0
            if (card.uuid or (row.host, card.id)) in the_teachers or not (strangers or taken_mib > IDLE_MIB):
                continue
            who = f"process {', '.join(map(str, strangers))}" if strangers else "another process, unseen from here,"
            much = f" {taken_mib / 1024:.1f} GiB of" if taken_mib else ""
            found.append(
                Finding(
                    kind="memory_taken",
                    ranks=(row.label,),
                    problem=f"{who} holds{much} GPU {card.id} ({card.uuid}) on {row.host}, which {row.label} works on.",
                    fix=f"end it (nvidia-smi on {row.host} shows it), or leave that GPU out with cluster.gpus.",
                )
            )
    return found


def _labels(rows: Sequence[RankPlace]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.label for row in rows))


def _names(rows: Sequence[RankPlace]) -> str:
    counts = {label: sum(row.label == label for row in rows) for label in _labels(rows)}
    return ", ".join(label if count == 1 else f"{label} ({count} times)" for label, count in counts.items())


def _ids(row: RankPlace) -> str:
    return ",".join(row.ray_gpu_ids or ())


def _device(device: Device) -> str:
    return device if isinstance(device, str) else f"number {device[1]}"
