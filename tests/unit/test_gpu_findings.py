"""Test the rules that find placement problems, each with a valid map that is changed, and the printed table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from gkd.cluster.gpu_findings import find_problems
from gkd.cluster.gpu_table import TEACHER, GpuInfo, GpuMap, PoolNeed, RankPlacement, gpu_map_from_json, gpu_report
from gkd.errors import ClusterError
from gkd.start.gpu_map import check_can_run, non_adjacent
from gkd.tools.check_gpus import refresh

ACTOR, ROLLOUT = (
    PoolNeed(name="actor", n_ranks=2, gpus_per_rank=1, tp=2),
    PoolNeed(name="rollout", n_ranks=1, gpus_per_rank=2),
)


def gpu_info(number: int, **changed: Any) -> GpuInfo:
    known: dict[str, Any] = {
        "uuid": f"GPU-{number}",
        "name": "H100",
        "pci_bus": f"00000000:{number}0:00.0",
        "numa_node": 0,
        "memory_total_mib": 143771,
        "memory_free_mib": 143100,
    }
    return GpuInfo(id=str(number), **{**known, **changed})


def row(pool: str, rank: int, *gpus: int, **changed: Any) -> RankPlacement:
    ids = tuple(map(str, gpus))
    known: dict[str, Any] = {
        "local_rank": rank,
        "host": "a",
        "node": "node-a",
        "pid": 100 * len(pool) + rank,
        "cuda_visible_devices": ",".join(ids),
        "ray_gpu_ids": ids,
        "current_device": 0,
        "gpus": tuple(gpu_info(gpu) for gpu in gpus),
    }
    return RankPlacement(pool=pool, rank=rank, **{**known, **changed})


def teacher(*gpus: int, **changed: Any) -> RankPlacement:
    return row(TEACHER, 0, *gpus, **{"name": "w0.0", "node": "", "ray_gpu_ids": None, **changed})


RIGHT = [row("actor", 0, 0), row("actor", 1, 1), row("rollout", 0, 2, 3), teacher(4, 5)]


def logical(rows: list[RankPlacement]) -> list[RankPlacement]:
    """Return the rows as they are without a driver."""
    return [
        structs.replace(
            row, current_device=None, gpus=tuple(GpuInfo(id=c.id) for c in row.gpus if row.cuda_visible_devices)
        )
        for row in rows
    ]


@pytest.mark.parametrize("known", [True, False], ids=["real", "logical"])
def test_valid_placement_has_no_findings(known: bool) -> None:
    """Fails if a valid placement is reported as a problem."""
    assert find_problems(RIGHT if known else logical(RIGHT), [ACTOR, ROLLOUT]) == []


def unset(row: RankPlacement) -> RankPlacement:
    """Return the row of a rank for which Ray does not set CUDA_VISIBLE_DEVICES: it sees all GPUs."""
    return structs.replace(row, cuda_visible_devices=None, gpus=tuple(map(gpu_info, range(8))))


# case -> rows, the kinds of the findings, and the ranks of the first one
WRONG: dict[str, tuple[list[RankPlacement], list[str], str]] = {
    "two ranks of a pool on one GPU": (
        [row("actor", 0, 0), row("actor", 1, 0), *RIGHT[2:]],
        ["shared_gpu"],
        "actor 0, actor 1",
    ),
    "two pools on one GPU": ([*RIGHT[:2], row("rollout", 0, 1, 2), RIGHT[3]], ["shared_gpu"], "actor 1, rollout 0"),
    "one engine twice on one GPU": ([*RIGHT[:2], row("rollout", 0, 2, 2), RIGHT[3]], ["shared_gpu"], "rollout 0"),
    "a pool on the teacher's GPU": ([*RIGHT[:3], teacher(3, 4)], ["teacher_overlap"], "rollout 0, teacher 0 (w0.0)"),
    "fewer GPUs than required": ([*RIGHT[:2], row("rollout", 0, 2), RIGHT[3]], ["too_few_gpus"], "rollout 0"),
    "an id without a GPU": ([row("actor", 0, 9, gpus=()), *RIGHT[1:]], ["too_few_gpus"], "actor 0"),
    "a missing rank": (RIGHT[1:], ["too_few_gpus"], ""),
    # Both then use GPU 0.
    "unset on one machine": ([*map(unset, RIGHT[:2]), *RIGHT[2:]], ["shared_gpu", "unset"], "actor 0, actor 1"),
    "not the GPU that Ray assigned": (
        [row("actor", 0, 6, ray_gpu_ids=("0",)), *RIGHT[1:]],
        ["reordered"],
        "actor 0",
    ),
    "one TP group on two nodes": (
        [RIGHT[0], row("actor", 1, 1, host="b", node="node-b"), *RIGHT[2:]],
        ["split_tp_group"],
        "actor 0, actor 1",
    ),
    "a process on the GPU": (
        [row("actor", 0, 0, gpus=(gpu_info(0, pids=(4242,), memory_free_mib=100000),)), *RIGHT[1:]],
        ["memory_taken"],
        "actor 0",
    ),
    "memory allocated by an unknown process": (
        [*RIGHT[:2], row("rollout", 0, 2, 3, gpus=(gpu_info(2), gpu_info(3, memory_free_mib=9))), RIGHT[3]],
        ["memory_taken"],
        "rollout 0",
    ),
}
# What a driver alone can tell.
ON_REAL = {"a process on the GPU", "memory allocated by an unknown process", "unset on one machine"}


@pytest.mark.parametrize("case", WRONG)
def test_every_problem_is_found(case: str) -> None:
    """Fails if a problem is missed or has another kind, or if the finding does not name the ranks."""
    rows, kinds, ranks = WRONG[case]
    findings = find_problems(rows, [ACTOR, ROLLOUT])
    assert [finding.kind for finding in findings] == kinds, findings
    assert ", ".join(findings[0].ranks) == ranks and all(finding.fix for finding in findings)
    without_driver = [] if case in ON_REAL else kinds
    if case == "unset on one machine":
        without_driver = ["unset"]
    assert [finding.kind for finding in find_problems(logical(rows), [ACTOR, ROLLOUT])] == without_driver


def test_colocated_pools() -> None:
    """Fails if colocated pools are a finding, or if colocation hides two ranks of one pool on a GPU."""
    engines = PoolNeed(name="rollout", n_ranks=2, gpus_per_rank=1, shares_with="actor")
    rows = [row(pool, rank, rank) for pool in ("actor", "rollout") for rank in range(2)]
    needs = [replace(ACTOR, n_ranks=2, tp=1), engines]
    assert find_problems(rows, needs) == []
    assert {finding.kind for finding in find_problems(rows, [needs[0], replace(engines, shares_with="")])} == {
        "shared_gpu"
    }
    three = [*rows, row("actor", 2, 0)]
    assert [finding.kind for finding in find_problems(three, [replace(needs[0], n_ranks=3), engines])] == ["shared_gpu"]


def test_gpus_are_identified_by_uuid() -> None:
    """Fails if one GPU with two ids is missed, or if two GPUs with the same id on two machines are taken for one."""
    hidden = [RIGHT[0], row("actor", 1, 1, gpus=(gpu_info(1, uuid="GPU-0"),)), *RIGHT[2:]]
    assert [finding.kind for finding in find_problems(hidden, [ACTOR, ROLLOUT])] == ["shared_gpu"]
    far = [row("actor", 0, 0), row("actor", 1, 0, node="node-b")]
    needs = [replace(ACTOR, tp=1)]
    assert find_problems(logical(far), needs) == [], "simulated nodes on one host have separate GPUs"
    assert find_problems(logical([*far[:1], structs.replace(far[1], host="b"), teacher(0, host="c")]), needs) == []


def test_memory_of_the_ranks_and_the_teacher_is_not_a_finding() -> None:
    """Fails if the running job itself, or the teacher, is reported as a foreign process."""
    own = [row("actor", 0, 0, gpus=(gpu_info(0, pids=(500, 500), memory_free_mib=5),)), *RIGHT[1:]]
    assert find_problems(own, [ACTOR, ROLLOUT], loaded=True) == []
    both = [row("actor", 0, 0, gpus=(gpu_info(0, pids=(9,), memory_free_mib=5),)), *RIGHT[1:3], teacher(0)]
    assert [finding.kind for finding in find_problems(both, [ACTOR, ROLLOUT])] == ["teacher_overlap"]
    assert find_problems(both, [ACTOR, ROLLOUT], teacher_gpu_share=0.1) == [], "as the settings state"


def test_run_stops_if_ranks_share_a_real_gpu() -> None:
    """Fails if a run with a shared GPU starts (NCCL would hang), or if shared logical GPUs stop a CPU run."""
    rows = (row("actor", 0, 0), row("actor", 1, 0))
    findings = tuple(find_problems(rows, [replace(ACTOR, tp=1)]))
    table = GpuMap(device="cuda", pools=(ACTOR,), rows=rows, findings=findings)
    with pytest.raises(ClusterError):
        check_can_run(table)
    check_can_run(structs.replace(table, device="cpu"))
    check_can_run(structs.replace(table, findings=tuple(find_problems([unset(rows[0])], [ACTOR]))))


def test_printed_table_and_file() -> None:
    """Fails if a column is missing in the table or in gpus.json, or if a worker name can control the terminal."""
    rows = (*RIGHT[:3], teacher(4, name="w\x1b[2J"))
    table = GpuMap(device="cuda", pools=(ACTOR, ROLLOUT), rows=rows, findings=(), notes=("2 ranks",))
    on_cpu = gpu_report(structs.replace(table, rows=tuple(logical(RIGHT)))).splitlines()[0].split()
    assert "VISIBLE" in on_cpu and not {"CURRENT", "UUID", "NUMA"} & set(on_cpu), "columns without a value are left out"
    lines = gpu_report(table).splitlines()
    assert lines[0].split()[:6] == ["POOL", "RANK", "LOCAL", "HOST", "PID", "CUDA_VISIBLE_DEVICES"]
    assert lines[3].split()[:9] == ["rollout", "0", "0", "a", "700", "2,3", "2,3", "2", "0"]
    assert "w?[2J" in lines[4] and lines[6] == "note: 2 ranks" and len(lines) == 8 and "WRONG" not in lines[7]
    assert "cluster.gpus: 0,1,2" in gpu_report(structs.replace(table, gpus=(0, 1, 2))).splitlines()[5]
    assert gpu_map_from_json(table.to_json(), "x") == table
    assert b'"verdicts"' in table.to_json() and b'"cards"' in table.to_json(), "keys of older files"
    for damaged in (b"", b"{}", b"\xff", table.to_json().replace(b'"version": 1', b'"version": 2')):
        with pytest.raises(ClusterError):
            gpu_map_from_json(damaged, "gpus.json")


@pytest.mark.parametrize("known", [True, False], ids=["real", "logical"])
def test_rank_outside_of_cluster_gpus(known: bool) -> None:
    """Fails if a rank on a GPU outside of cluster.gpus is missed at the start or later, or is not named."""
    rows = RIGHT if known else logical(RIGHT)
    assert find_problems(rows, [ACTOR, ROLLOUT], gpus=(0, 1, 2, 3)) == []
    findings = find_problems(rows, [ACTOR, ROLLOUT], gpus=(1, 2))
    assert [(finding.kind, finding.ranks) for finding in findings] == [("outside_gpus", ("actor 0", "rollout 0"))]
    assert "cluster.gpus [1,2], on a (actor 0: 0; rollout 0: 2,3)" in findings[0].problem
    assert "CUDA_VISIBLE_DEVICES=1,2 ray start" in findings[0].fix
    table = GpuMap(device="cpu", pools=(ACTOR, ROLLOUT), rows=tuple(rows), findings=tuple(findings), gpus=(1, 2))
    with pytest.raises(ClusterError):
        check_can_run(table)
    again = refresh(gpu_map_from_json(table.to_json(), "x"), "elsewhere", [], [])
    assert [finding.kind for finding in again.findings] == ["outside_gpus"]


def test_non_adjacent_gpus_are_noted() -> None:
    """Fails if an engine with non-adjacent GPUs gets no note, or one with adjacent GPUs does."""
    assert list(non_adjacent(RIGHT, ())) == [] and list(non_adjacent([row("rollout", 0, 2, 6)], (2, 6, 7))) == []
    for gpus in ((), (1, 2, 4, 6)):
        (note,) = non_adjacent([*RIGHT, row("rollout", 1, 2, 6)], gpus)
        assert note.startswith("rollout 1 ") and " 2,6" in note and f" {'4' if gpus else '3,4,5'} " in note
