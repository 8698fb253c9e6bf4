"""Every way in which ranks can sit wrongly, forced on a table that is right, and the table itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gkd.cluster.gpu_table import TEACHER, Card, GpuMap, PoolNeed, RankPlace, survey_of
from gkd.errors import ClusterError
from gkd.gpu_map.collect import check_can_run, scattered
from gkd.gpu_map.findings import judge
from gkd.gpu_map.report import place_table
from gkd.gpu_map.running import look_again

ACTOR, ROLLOUT = (
    PoolNeed(name="actor", n_ranks=2, gpus_per_rank=1, tp=2),
    PoolNeed(name="rollout", n_ranks=1, gpus_per_rank=2),
)


def card(number: int, **changed: Any) -> Card:
    known: dict[str, Any] = {
        "uuid": f"GPU-{number}",
        "name": "H100",
        "pci_bus": f"00000000:{number}0:00.0",
        "numa_node": 0,
        "memory_total_mib": 143771,
        "memory_free_mib": 143100,
    }
    return Card(id=str(number), **{**known, **changed})


def row(pool: str, rank: int, *gpus: int, **changed: Any) -> RankPlace:
    ids = tuple(map(str, gpus))
    known: dict[str, Any] = {
        "local_rank": rank,
        "host": "a",
        "node": "node-a",
        "pid": 100 * len(pool) + rank,
        "cuda_visible_devices": ",".join(ids),
        "ray_gpu_ids": ids,
        "current_device": 0,
        "cards": tuple(card(gpu) for gpu in gpus),
    }
    return RankPlace(pool=pool, rank=rank, **{**known, **changed})


def teacher(*gpus: int, **changed: Any) -> RankPlace:
    return row(TEACHER, 0, *gpus, **{"name": "w0.0", "node": "", "ray_gpu_ids": None, **changed})


RIGHT = [row("actor", 0, 0), row("actor", 1, 1), row("rollout", 0, 2, 3), teacher(4, 5)]


def logical(rows: list[RankPlace]) -> list[RankPlace]:
    """The same where no driver tells anything."""
    return [
        replace(row, current_device=None, cards=tuple(Card(id=c.id) for c in row.cards if row.cuda_visible_devices))
        for row in rows
    ]


@pytest.mark.parametrize("known", [True, False], ids=["real", "logical"])
def test_a_right_table_is_left_alone(known: bool) -> None:
    """Fails if a job that is set up well is told that it is not."""
    assert judge(RIGHT if known else logical(RIGHT), [ACTOR, ROLLOUT]) == []


def unset(row: RankPlace) -> RankPlace:
    """What a rank is where Ray was told to leave CUDA_VISIBLE_DEVICES alone: it sees all cards."""
    return replace(row, cuda_visible_devices=None, cards=tuple(map(card, range(8))))


# (what, the rows, the verdicts on real and on logical GPUs, words of the first)
WRONG: list[tuple[str, list[RankPlace], list[str], list[str], list[str]]] = [
    (
        "two ranks of a pool on one GPU",
        [row("actor", 0, 0), row("actor", 1, 0), *RIGHT[2:]],
        ["shared_gpu"],
        ["shared_gpu"],
        ["actor 0, actor 1", "['0', '0']", "each GPU once"],
    ),
    (
        "two pools on one GPU",
        [*RIGHT[:2], row("rollout", 0, 1, 2), RIGHT[3]],
        ["shared_gpu"],
        ["shared_gpu"],
        ["actor 1, rollout 0", "['0', '1', '1,2']"],
    ),
    (
        "one engine twice on one GPU",
        [*RIGHT[:2], row("rollout", 0, 2, 2), RIGHT[3]],
        ["shared_gpu"],
        ["shared_gpu"],
        ["rollout 0 (2 times)"],
    ),
    (
        "a pool on the teacher's GPU",
        [*RIGHT[:3], teacher(3, 4)],
        ["teacher_overlap"],
        ["teacher_overlap"],
        ["rollout 0", "teacher 0 (w0.0)", "--gpus"],
    ),
    (
        "fewer GPUs than wanted",
        [*RIGHT[:2], row("rollout", 0, 2), RIGHT[3]],
        ["too_few_gpus"],
        ["too_few_gpus"],
        ["rollout 0 sees 1 ('2')", "n_gpus_per_node"],
    ),
    (
        "no GPU at all",
        [row("actor", 0, cuda_visible_devices="", ray_gpu_ids=()), *RIGHT[1:]],
        ["too_few_gpus"],
        ["too_few_gpus"],
        ["actor 0 sees 0 ('')"],
    ),
    (
        "a number that is no card",
        [row("actor", 0, 9, cards=()), *RIGHT[1:]],
        ["too_few_gpus"],
        ["too_few_gpus"],
        ["actor 0 sees 0 ('9')"],
    ),
    (
        "a rank that is missing",
        RIGHT[1:],
        ["too_few_gpus"],
        ["too_few_gpus"],
        ["actor wants 2 ranks", "there are 1", "add GPUs"],
    ),
    (
        "unset on one machine",  # both then begin with card 0
        [*map(unset, RIGHT[:2]), *RIGHT[2:]],
        ["shared_gpu", "unset"],
        ["unset"],
        ["actor 0, actor 1", "[None, None]"],
    ),
    (
        "unset for one rank",
        [unset(RIGHT[0]), *RIGHT[1:]],
        ["unset"],
        ["unset"],
        ["not set for actor 0", "RAY_EXPERIMENTAL_NOSET"],
    ),
    (
        "reordered",
        [*RIGHT[:2], row("rollout", 0, 3, 2, ray_gpu_ids=("2", "3")), RIGHT[3]],
        ["reordered"],
        ["reordered"],
        ["rollout 0: '3,2', Ray gave '2,3'"],
    ),
    (
        "another than Ray gave",
        [row("actor", 0, 6, ray_gpu_ids=("0",)), *RIGHT[1:]],
        ["reordered"],
        ["reordered"],
        ["actor 0: '6', Ray gave '0'"],
    ),
    (
        "one TP group on two nodes",
        [RIGHT[0], row("actor", 1, 1, host="b", node="node-b"), *RIGHT[2:]],
        ["split_tp_group"],
        ["split_tp_group"],
        ["actor 0 on a (node-a)", "actor 1 on b (node-b)", "tp is 2"],
    ),
    (
        "a process on the GPU",
        [row("actor", 0, 0, cards=(card(0, pids=(4242,), memory_free_mib=100000),)), *RIGHT[1:]],
        ["memory_taken"],
        [],
        ["process 4242 holds 42.7 GiB of GPU 0 (GPU-0) on a", "nvidia-smi on a"],
    ),
    (
        "memory taken by nobody in sight",
        [*RIGHT[:2], row("rollout", 0, 2, 3, cards=(card(2), card(3, memory_free_mib=9))), RIGHT[3]],
        ["memory_taken"],
        [],
        ["unseen from here", "GPU 3", "rollout 0"],
    ),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[0].replace(" ", "_"))
@pytest.mark.parametrize("known", [True, False], ids=["real", "logical"])
def test_every_wrong_is_found(case: tuple[str, list[RankPlace], list[str], list[str], list[str]], known: bool) -> None:
    """Fails if that mistake starts a training that hangs, or is called by another name, or nobody is named."""
    _, rows, on_real, on_logical, words = case
    verdicts = judge(rows if known else logical(rows), [ACTOR, ROLLOUT])
    assert [verdict.kind for verdict in verdicts] == (on_real if known else on_logical), verdicts
    assert all(" Fix: " in str(verdict) for verdict in verdicts)
    if known:
        for word in words:
            assert word in str(verdicts[0]), str(verdicts[0])


def test_the_four_ranks_of_the_classic_clash() -> None:
    """Fails if two pairs of ranks on two GPUs are not told apart."""
    rows = [row("actor", rank, rank // 2) for rank in range(4)]
    verdicts = judge(rows, [PoolNeed(name="actor", n_ranks=4, gpus_per_rank=1)])
    assert [verdict.ranks for verdict in verdicts] == [("actor 0", "actor 1"), ("actor 2", "actor 3")]
    assert all("['0', '0', '1', '1']" in verdict.problem for verdict in verdicts)


def test_pools_that_share_their_gpus_on_purpose() -> None:
    """Fails if colocated pools are called a mistake, or under their cover two ranks of one pool on a GPU pass."""
    engines = PoolNeed(name="rollout", n_ranks=2, gpus_per_rank=1, shares_with="actor")
    rows = [row(pool, rank, rank) for pool in ("actor", "rollout") for rank in range(2)]
    needs = [replace(ACTOR, n_ranks=2, tp=1), engines]
    assert judge(rows, needs) == []
    assert {verdict.kind for verdict in judge(rows, [needs[0], replace(engines, shares_with="")])} == {"shared_gpu"}
    three = [*rows, row("actor", 2, 0)]
    assert [verdict.kind for verdict in judge(three, [replace(needs[0], n_ranks=3), engines])] == ["shared_gpu"]


def test_cards_are_told_apart_by_uuid_first() -> None:
    """Fails if one card under two numbers is missed, or two cards of one number on two machines are called one."""
    hidden = [RIGHT[0], row("actor", 1, 1, cards=(card(1, uuid="GPU-0"),)), *RIGHT[2:]]
    assert [verdict.kind for verdict in judge(hidden, [ACTOR, ROLLOUT])] == ["shared_gpu"]
    far = [row("actor", 0, 0), row("actor", 1, 0, node="node-b")]
    needs = [replace(ACTOR, tp=1)]
    assert judge(logical(far), needs) == [], "nodes simulated on one host have GPUs of their own"
    assert judge(logical([*far[:1], replace(far[1], host="b"), teacher(0, host="c")]), needs) == []


def test_what_the_teacher_and_the_ranks_hold_is_no_strangers() -> None:
    """Fails if a job that runs, or the teacher, is reported as a process that must be ended."""
    own = [row("actor", 0, 0, cards=(card(0, pids=(500, 500), memory_free_mib=5),)), *RIGHT[1:]]
    assert judge(own, [ACTOR, ROLLOUT], loaded=True) == []
    both = [row("actor", 0, 0, cards=(card(0, pids=(9,), memory_free_mib=5),)), *RIGHT[1:3], teacher(0)]
    assert [verdict.kind for verdict in judge(both, [ACTOR, ROLLOUT])] == ["teacher_overlap"]


def test_the_run_stops_where_it_could_only_hang() -> None:
    """Fails if NCCL is left to hang on a shared card, or logical GPUs keep a run on CPUs from starting."""
    rows = (row("actor", 0, 0), row("actor", 1, 0))
    verdicts = tuple(judge(rows, [replace(ACTOR, tp=1)]))
    table = GpuMap(device="cuda", pools=(ACTOR,), rows=rows, verdicts=verdicts)
    with pytest.raises(ClusterError, match="actor 0, actor 1 work on one GPU, GPU-0"):
        check_can_run(table)
    check_can_run(replace(table, device="cpu"))
    check_can_run(replace(table, verdicts=tuple(judge([unset(rows[0])], [ACTOR]))))


def test_the_table_and_its_file() -> None:
    """Fails if a column is lost on the way to people or to gpus.json, or a teacher's name steers the terminal."""
    rows = (*RIGHT[:3], teacher(4, name="w\x1b[2J"))
    table = GpuMap(device="cuda", pools=(ACTOR, ROLLOUT), rows=rows, verdicts=(), notes=("2 ranks",))
    lines = place_table(table).splitlines()
    assert lines[0].split()[:6] == ["POOL", "RANK", "LOCAL", "HOST", "PID", "CUDA_VISIBLE_DEVICES"]
    words = lines[3].split()
    assert words[:9] == ["rollout", "0", "0", "a", "700", "2,3", "2,3", "2", "0"]
    assert words[9:] == [
        *("H100", "GPU-2,", "GPU-3", "00000000:20:00.0,", "00000000:30:00.0", "0"),
        *("139.7", "of", "140.4", "GiB"),
    ]
    assert "w?[2J" in lines[4] and lines[5:] == ["note: 2 ranks", "nothing is wrong with it"]
    told = place_table(replace(table, gpus=(0, 1, 2), order=("rollout", "actor"))).splitlines()[5]
    assert told == "cluster.gpus: 0,1,2; the low ids go to: rollout, then actor"
    assert survey_of(table.to_json(), "x") == table
    for damaged in (b"", b"{}", b"\xff", table.to_json().replace(b'"version": 1', b'"version": 2')):
        with pytest.raises(ClusterError, match="gpus.json is not"):
            survey_of(damaged, "gpus.json")


@pytest.mark.parametrize("known", [True, False], ids=["real", "logical"])
def test_a_rank_outside_of_the_allowed_gpus(known: bool) -> None:
    """Fails if a rank may sit where cluster.gpus says it must not, at the start or later, or who does is not said."""
    rows = RIGHT if known else logical(RIGHT)
    assert judge(rows, [ACTOR, ROLLOUT], gpus=(0, 1, 2, 3)) == []
    verdicts = judge(rows, [ACTOR, ROLLOUT], gpus=(1, 2))
    assert [(verdict.kind, verdict.ranks) for verdict in verdicts] == [("outside_gpus", ("actor 0", "rollout 0"))]
    assert "not in cluster.gpus [1,2], on a (actor 0: 0; rollout 0: 2,3)" in verdicts[0].problem
    assert "CUDA_VISIBLE_DEVICES=1,2 ray start" in verdicts[0].fix
    table = GpuMap(device="cpu", pools=(ACTOR, ROLLOUT), rows=tuple(rows), verdicts=tuple(verdicts), gpus=(1, 2))
    with pytest.raises(ClusterError, match="not in cluster.gpus"):
        check_can_run(table)
    again = look_again(survey_of(table.to_json(), "x"), "elsewhere", [], [])
    assert [verdict.kind for verdict in again.verdicts] == ["outside_gpus"]


def test_gpus_that_are_no_neighbours_are_noted() -> None:
    """Fails if an engine that Ray spread over a machine is slow and nobody can see why, or a compact one is blamed."""
    assert list(scattered(RIGHT, ())) == [] and list(scattered([row("rollout", 0, 2, 6)], (2, 6, 7))) == []
    for gpus in ((), (1, 2, 4, 6)):
        (note,) = scattered([*RIGHT, row("rollout", 1, 2, 6)], gpus)
        assert note.startswith(f"rollout 1 works on GPUs 2,6 and not on {'4' if gpus else '3,4,5'} between them")


def test_the_line_of_a_rank() -> None:
    """Fails if the line that people look for in a log says something else."""
    line = row("actor", 3, 6, 7).line()
    assert line.startswith("actor worker 3: CUDA_VISIBLE_DEVICES=6,7, GPU count=2, host=a, pid=")
