"""Test the rules that find placement problems, each with a valid map that is changed, and the printed table."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from gkd.cluster.gpu_table import TEACHER, Finding, GpuInfo, GpuMap, RankPlacement, find_problems, gpu_map_from_json
from gkd.errors import ClusterError


def gpu_info(number: int, **changed: Any) -> GpuInfo:
    known: dict[str, Any] = {
        "uuid": f"GPU-{number}",
        "name": "H100",
        "pci_bus": f"00000000:{number}0:00.0",
        "memory_total_mib": 143771,
        "memory_free_mib": 143100,
    }
    return GpuInfo(id=str(number), **{**known, **changed})


def row(pool: str, rank: int, *gpus: int, **changed: Any) -> RankPlacement:
    ids = tuple(map(str, gpus))
    known: dict[str, Any] = {
        "host": "a",
        "node": "node-a",
        "pid": 100 * len(pool) + rank,
        "cuda_visible_devices": ",".join(ids),
        "ray_gpu_ids": ids,
        "gpus": tuple(gpu_info(gpu) for gpu in gpus),
    }
    return RankPlacement(pool=pool, rank=rank, **{**known, **changed})


def teacher(*gpus: int, **changed: Any) -> RankPlacement:
    return row(TEACHER, 0, *gpus, **{"name": "w0.0", "node": "", "ray_gpu_ids": (), **changed})


def unset(row: RankPlacement) -> RankPlacement:
    """Return the row of a rank for which Ray does not set CUDA_VISIBLE_DEVICES: it sees all GPUs."""
    return structs.replace(row, cuda_visible_devices=None, gpus=tuple(map(gpu_info, range(8))))


def logical(rows: list[RankPlacement]) -> list[RankPlacement]:
    """Return the rows as they are without a driver."""
    return [structs.replace(row, gpus=tuple(GpuInfo(id=gpu.id) for gpu in row.gpus)) for row in rows]


RIGHT = [row("actor", 0, 0), row("actor", 1, 1), row("rollout", 0, 2, 3), teacher(4, 5)]
COLOCATED = [row("actor", 0, 0), row("actor", 1, 1), row("rollout", 0, 0, 1, ray_gpu_ids=())]
SHARED, OUTSIDE, TOO_FEW, OVERLAP = "shared_gpu", "outside_gpus", "too_few_gpus", "teacher_overlap"

# case -> rows; kind and ranks of each finding
CASES: dict[str, tuple[list[RankPlacement], list[tuple[str, str]]]] = {
    "right": (RIGHT, []),
    "pools that take turns": (COLOCATED, []),
    "two ranks of a pool on one GPU": ([RIGHT[0], row("actor", 1, 0), *RIGHT[2:]], [(SHARED, "actor 0, actor 1")]),
    "two ranks where pools take turns": ([*COLOCATED, row("actor", 2, 0)], [(SHARED, "actor 0, rollout 0, actor 2")]),
    "one engine twice on one GPU": ([*RIGHT[:2], row("rollout", 0, 2, 2)], [(SHARED, "rollout 0")]),
    "a pool on the teacher's GPU": ([*RIGHT[:3], teacher(3, 4)], [(OVERLAP, "rollout 0, teacher 0 (w0.0)")]),
    "fewer GPUs than assigned": ([*RIGHT[:2], row("rollout", 0, 2, ray_gpu_ids=("2", "3"))], [(TOO_FEW, "rollout 0")]),
    "nothing visible": ([row("actor", 0, ray_gpu_ids=("0",)), *RIGHT[1:]], [(TOO_FEW, "actor 0")]),
    "another GPU than Ray assigned": ([row("actor", 0, 6, ray_gpu_ids=("0",)), *RIGHT[1:]], [(OUTSIDE, "actor 0")]),
    "unset, so both use GPU 0": (
        [*map(unset, RIGHT[:2]), *RIGHT[2:]],
        [(SHARED, "actor 0, actor 1"), (OUTSIDE, "actor 1")],
    ),
}


@pytest.mark.parametrize("known", [True, False], ids=["real", "logical"])
@pytest.mark.parametrize("case", CASES)
def test_findings(case: str, known: bool) -> None:
    """Fails if a problem is missed, has another kind or names other ranks, or if a valid placement is a problem."""
    rows, expected = CASES[case]
    findings = find_problems(rows if known else logical(rows), ())
    assert [(finding.kind, ", ".join(finding.ranks)) for finding in findings] == expected
    assert all(finding.fix for finding in findings)


def test_gpus_are_identified_by_uuid() -> None:
    """Fails if one GPU with two ids is missed, or if two GPUs with the same id on two machines are taken for one."""
    hidden = [RIGHT[0], row("actor", 1, 1, gpus=(gpu_info(1, uuid="GPU-0"),))]
    assert [finding.kind for finding in find_problems(hidden, ())] == [SHARED]
    far = [row("actor", 0, 0), row("actor", 1, 0, node="node-b")]
    assert find_problems(logical(far), ()) == [], "simulated nodes on one host have separate GPUs"
    assert find_problems(logical([*far[:1], structs.replace(far[1], host="b"), teacher(0, host="c")]), ()) == []


def test_the_teachers_gpus_are_shared_on_purpose() -> None:
    """Fails if cluster.teacher_gpu_share does not allow the pools to use the teacher's GPUs."""
    both = [*RIGHT[:3], teacher(0)]
    assert [finding.kind for finding in find_problems(both, ())] == [OVERLAP]
    assert find_problems(both, (), with_teacher=True) == []


@pytest.mark.parametrize("known", [True, False], ids=["real", "logical"])
def test_rank_outside_of_cluster_gpus(known: bool) -> None:
    """Fails if a rank on a GPU outside of cluster.gpus is missed, or is not named with its GPUs and the fix."""
    rows = RIGHT if known else logical(RIGHT)
    assert find_problems(rows, (0, 1, 2, 3)) == []
    findings = find_problems(rows, (1, 2))
    assert [(finding.kind, finding.ranks) for finding in findings] == [(OUTSIDE, ("actor 0", "rollout 0"))]
    assert "cluster.gpus [1,2]" in findings[0].problem
    assert "actor 0 on a: 0; rollout 0 on a: 2,3" in findings[0].problem
    assert "CUDA_VISIBLE_DEVICES=1,2 ray start" in findings[0].fix


def test_printed_table_and_file() -> None:
    """Fails if a column is missing in the table or in gpus.json, or if a worker name can control the terminal."""
    rows = (*RIGHT[:3], teacher(4, name="w\x1b[2J"))
    table = GpuMap(device="cuda", rows=rows, findings=(), note="2 ranks", gpus=(0, 1, 2))
    on_cpu = structs.replace(table, rows=tuple(logical(RIGHT))).text().splitlines()[0]
    assert on_cpu.endswith("GPU IDS  VISIBLE"), "columns without a value are left out"
    lines = table.text().splitlines()
    assert lines[0].split()[:4] == ["RANK", "HOST", "PID", "CUDA_VISIBLE_DEVICES"]
    assert lines[3].split()[:9] == ["rollout", "0", "a", "700", "2,3", "2,3", "2", "H100", "GPU-2,"]
    assert lines[3].endswith("00000000:20:00.0, 00000000:30:00.0  139.7 of 140.4 GiB")
    assert "w?[2J" in lines[4] and "cluster.gpus: 0,1,2" in lines[5]
    assert lines[6:] == ["note: 2 ranks", "no problems found"]
    wrong = Finding(kind="shared_gpu", problem="two ranks.", fix="one.")
    assert structs.replace(table, findings=(wrong,)).text().endswith("WRONG shared_gpu: two ranks. Fix: one.")
    assert gpu_map_from_json(table.to_json(), "x") == table
    for damaged in (b"", b"{}", b"\xff", table.to_json()[:-20]):
        with pytest.raises(ClusterError, match="gpus.json"):
            gpu_map_from_json(damaged, "gpus.json")
