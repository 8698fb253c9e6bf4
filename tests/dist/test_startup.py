"""Ranks that do not come up, or hang later: real Ray actors of the real class in a real gloo group."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from gkd.actor.megatron.cpu_shim import install_cpu_shim
from gkd.actor.megatron.groups import init_groups, probe_groups
from gkd.actor.pool import ActorPool
from gkd.actor.worker import CONCURRENCY_GROUPS, ActorWorker
from gkd.cluster.calls import gather
from gkd.cluster.hang import HangReport, hang_report
from gkd.cluster.pools import Pool
from gkd.cluster.startup import Startup
from gkd.config.load import load_config
from gkd.errors import RankTimeout
from gkd.launcher import worker_env
from tests.dist.slots import actor_slots

pytestmark = pytest.mark.dist

N_RANKS = 3
LATE = 2  # the rank that keeps the others waiting


class Rank(ActorWorker):
    """A rank that joins the real group and Megatron's, and has a meeting of all ranks in the place of a student; one
    stays away from it.
    """

    def _build_student(self, total_steps: int, timeout_s: float) -> None:  # type: ignore[override]
        told: list[str] = []
        install_cpu_shim()
        probe_groups(init_groups(self._layout), self._device, told.append)
        # One tensor-parallel group of all ranks: it is the world, and in Megatron's eyes several groups.
        assert told and all(text.endswith(f"of ranks {list(range(N_RANKS))}") for text in told), told
        assert any("group tp " in text for text in told) and any("intra_dist_opt " in text for text in told), told
        if self._rank == LATE:
            self._phases.enter("reading from a disk that does not answer")
            read_from_a_dead_disk(total_steps)
        self._phases.enter("meeting the others")
        dist.barrier()


def read_from_a_dead_disk(seconds: float) -> None:
    time.sleep(seconds)


@pytest.fixture(scope="module")
def slots() -> Iterator[Pool]:
    with actor_slots(N_RANKS) as made:
        yield made


@pytest.fixture(scope="module")
def hung(slots: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[RankTimeout, HangReport, list[str], list[str]]:
    """A start that is given up: its error, the report, the lines told on the way; then one more report, with the late
    rank stopped.
    """
    base = ["data.train_files=[a]", "model.path=m", f"trainer.run_dir={tmp_path_factory.mktemp('run')}"]
    config = load_config(None, [*base, f"trainer.n_gpus_per_node={N_RANKS}", f"actor.tp={N_RANKS}"])
    workers = slots.spawn(Rank, worker_env(on_cpu=True), concurrency_groups=CONCURRENCY_GROUPS)
    actor, told = ActorPool(workers, config), []
    gather({n: w.node_id.remote() for n, w in slots.named(workers).items()}, "process", 240)  # imports take their time
    startup = Startup(timeout_s=4, log_every_s=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gkd.cluster.startup.log.info", lambda text, *args: told.append(text % args))
        with pytest.raises(RankTimeout) as raised, startup:
            startup.watch(slots.named(workers))
            gather(actor.init_model("cpu", 600, startup.left_s()), "init_model", startup.left_s())
    report = hang_report(slots.run, startup.names, startup.ask(), raised.value.late)
    os.kill(next(int(line.split("pid ")[1].split(")")[0]) for line in report.lines if "disk" in line), signal.SIGSTOP)
    stopped = hang_report(slots.run, [*startup.names, "actor rank 9"], startup.ask(0.5), []).lines
    return raised.value, report, told, stopped


@pytest.mark.parametrize(("left_s", "named"), [(0.01, True), (30.0, False)])
def test_a_wait_may_end_just_before_the_deadline(left_s: float, named: bool) -> None:
    """Fails if the setting is named only where the clocks of Ray and Python agree, or where it was not to blame."""
    startup = Startup(timeout_s=left_s)
    with pytest.raises(RankTimeout) as raised, startup:
        raise RankTimeout("no answer", ["actor rank 0"])
    assert ("trainer.init_timeout_s" in str(raised.value)) == named


def test_the_error_names_the_setting_and_who_is_late(
    hung: tuple[RankTimeout, HangReport, list[str], list[str]],
) -> None:
    """Fails if a start that hangs goes on for ever, or ends without saying after how long and for whom it waited."""
    text = str(hung[0])
    assert "trainer.init_timeout_s = 4" in text
    assert all(f"actor rank {rank}" in text for rank in range(N_RANKS))


def test_the_rank_that_the_others_wait_for_is_told_from_them(
    hung: tuple[RankTimeout, HangReport, list[str], list[str]],
) -> None:
    """Fails if, of many ranks that hang, the user is not pointed at the one whose fault it is, and its line of code."""
    culprit, others = hung[1].lines
    assert culprit.startswith(f"actor rank {LATE} (") and "reading from a disk that does not answer for" in culprit
    assert "(read_from_a_dead_disk)" in culprit
    assert (
        others.startswith("2 (actor rank 0, actor rank 1) wait for others, the first: ")
        and "meeting the others" in others
    )
    assert "barrier" not in hung[1].telling and "read_from_a_dead_disk" in hung[1].telling
    assert all(f"== actor rank {rank} (" in hung[1].stacks for rank in range(N_RANKS))
    assert hung[1].stacks.count("in barrier") == N_RANKS - 1


def test_the_start_tells_how_far_each_rank_is(hung: tuple[RankTimeout, HangReport, list[str], list[str]]) -> None:
    """Fails if a long start is silent, or its lines do not follow what the ranks do."""
    last = hung[2][-1]
    assert last.startswith(f"0 of {N_RANKS} ranks are up, ") and " s left" in last
    assert "2 meeting the others (" in last
    assert f"1 reading from a disk that does not answer (actor rank {LATE} " in last


def test_what_gives_no_stack_says_why(hung: tuple[RankTimeout, HangReport, list[str], list[str]]) -> None:
    """Fails if a process that is stopped, or one that was never started, is passed over or keeps the report waiting."""
    lines = hung[3]
    assert "actor rank 9: has no process: Ray has not started it" in lines
    stopped = next(line for line in lines if line.startswith(f"actor rank {LATE} ("))
    assert "it does not answer: stopped by a signal" in stopped
