"""Stages of gpu_proof that share the GPU: which run at the same time, with real processes, and the expected time."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gkd.cluster.gpu_table import GpuInfo
from gkd.tools.gpu_proof.judge import PASS, TIMED_OUT
from gkd.tools.gpu_proof.schedule import EXPECTED_ROOM, Room, expected_seconds, in_order, next_up
from gkd.tools.gpu_proof.stage import JSON, Stage
from gkd.tools.gpu_proof.stages import STAGES
from tests.bench.command import in_fresh_processes
from tests.gpu.bench_loop import _kv_cache_mib
from tests.unit.test_gpu_proof import CHILD, ROOT, run_together, stage


def sharing(mode: str, name: str, gib: int = 1) -> Stage:
    return replace(stage(CHILD, mode, JSON, name=name), shares_gib=gib)


def test_sharing_stages_run_at_the_same_time(tmp_path: Path) -> None:
    """Fails if stages that share the GPU run one after the other where there are cores for both."""
    outcomes = run_together(tmp_path, [sharing("meets a b", "a"), sharing("meets a b", "b")], cores=8)
    assert [outcome.verdict for outcome in outcomes.values()] == [PASS, PASS]


@pytest.mark.parametrize("cores", [2, 16])
def test_nothing_runs_beside_a_stage_that_is_alone(tmp_path: Path, cores: int) -> None:
    """Fails if a stage that measures the whole card runs together with another one."""
    stages = [sharing("shares", "a"), stage(CHILD, "alone", JSON, name="b"), sharing("shares", "c")]
    outcomes = run_together(tmp_path, stages, cores=cores)
    assert {name: outcome.verdict for name, outcome in outcomes.items()} == dict.fromkeys("abc", PASS)
    assert next(iter(outcomes)) == "b"


@pytest.mark.parametrize("cores", [2, 16])
def test_a_stage_waits_for_its_turn(tmp_path: Path, cores: int) -> None:
    """Fails if a stage that is started ahead uses the GPU before its turn, or is not started ahead."""
    follower = replace(stage(CHILD, "waits", JSON, name="b"), ahead_s=5)
    # The leader ends when the follower has started, and passes if that has not measured by then.
    leader = stage(CHILD, "after b has started" if cores > 8 else "met", JSON, name="a")
    outcomes = run_together(tmp_path, [leader, follower], cores=cores, device="cuda")
    assert [outcome.verdict for outcome in outcomes.values()] == [PASS, PASS]
    assert (tmp_path / "b.log").read_text().split() == ["started", "measured"]
    assert not list(tmp_path.glob("*.turn"))


def test_the_next_case_imports_while_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if two cases of a benchmark measure at the same time, or the second one starts when the first has ended."""
    (tmp_path / "one_case.py").write_text(
        "import json, sys, time\nfrom gkd.tools.gpu_proof.turn import wait_for_turn\nstarted = time.monotonic()\n"
        "wait_for_turn()\nbegan = time.monotonic()\ntime.sleep(1)\nif 'fails' in sys.argv[1]: sys.exit(3)\n"
        "print(json.dumps({'started': started, 'began': began, 'ended': time.monotonic()}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    first, second = in_fresh_processes("one_case", [{}, {}], threads=1, timeout_s=30)
    assert second["started"] < first["ended"] <= second["began"]
    with pytest.raises(subprocess.CalledProcessError):
        in_fresh_processes("one_case", [{"mode": "fails"}, {}], threads=1, timeout_s=30)


def test_a_time_limit_stops_one_stage_only(tmp_path: Path) -> None:
    """Fails if the limit of one stage ends another that runs at the same time."""
    began = time.monotonic()
    stages = [replace(sharing("hangs", "a"), limit_s=1), sharing("slow", "b")]
    outcomes = run_together(tmp_path, stages, cores=8, grace_s=0.5)
    assert (outcomes["a"].verdict, outcomes["b"].verdict) == (TIMED_OUT, PASS)
    assert time.monotonic() - began < 15


def test_never_more_memory_than_the_card_has() -> None:
    """Fails if stages at the same time need more memory or cores than there are, or memory that is unknown."""
    waiting = [sharing("met", "a", 50), sharing("met", "b", 29)]
    running = [sharing("met", "c", 30)]
    assert next_up(waiting, running, Room(16, 80.0)) is waiting[1]
    assert next_up(waiting, running, Room(16, 80.1)) is waiting[0]
    assert next_up(waiting, running, Room(7, 200.0)) is None and next_up(waiting, running, Room(16, 0.0)) is None
    assert next_up(waiting, [stage(name="e")], Room(16, 80.0)) is None, "the other one runs alone"
    assert next_up([stage(name="d")], running, Room(16, 80.0)) is None, "it runs alone"
    assert next_up(waiting, [], Room(1, 0.0)) is waiting[0]


def test_the_expected_time_of_a_schedule() -> None:
    """Fails if the printed time is not that of the order in which stages run."""
    first, second = replace(stage(name="a"), expected_s=20), replace(stage(name="b"), expected_s=30, ahead_s=10)
    shared = [replace(sharing("met", name, 30), expected_s=seconds) for name, seconds in (("c", 40), ("d", 25))]
    assert expected_seconds([first, second]) == 20 + 30 - 10
    assert expected_seconds([first, second], Room(4, 80.0)) == 20 + 30
    assert expected_seconds([*shared, first]) == 20 + 40
    assert expected_seconds([*shared, first], Room(16, 59.0)) == 20 + 40 + 25
    assert [one.name for one in in_order([*reversed(shared), first])] == ["a", "c", "d"]


def test_the_environment_comes_first_and_the_models_are_not_waited_for() -> None:
    """Fails if a later stage loads the card before it is judged, or the stage with a preparation comes early."""
    order = in_order([one for one in STAGES if one.n_gpus == 1])
    assert order[0].name == "environment"
    before = order[: order.index(next(one for one in order if one.prepare))]
    assert expected_seconds(before) > 240


def test_the_loops_engine_frees_more_than_others_allocate() -> None:
    """Fails if stages that share the GPU with `loop` may allocate more than its engine frees in a sleep: vLLM asserts
    the opposite.
    """
    shares = {one.name: one.shares_gib for one in STAGES if one.shares_gib}
    on_card = _kv_cache_mib(GpuInfo(id="0", memory_total_mib=80 << 10)) / 1024
    assert on_card < shares.pop("loop")
    assert sum(sorted(shares.values())[-(EXPECTED_ROOM.width - 1) :]) <= on_card
