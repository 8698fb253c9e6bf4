"""Test ranks that hang at the start: real Ray actors of the real class in a real gloo group."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from logging.handlers import BufferingHandler

import pytest
import torch.distributed as dist

from gkd.actor.megatron.cpu_shim import install_cpu_shim
from gkd.actor.megatron.student import init_groups, probe_groups
from gkd.actor.pool import ActorPool
from gkd.actor.worker import CONCURRENCY_GROUPS, ActorWorker
from gkd.cluster.calls import gather
from gkd.cluster.pool import Pool
from gkd.cluster.stacks import HangReport, hang_report
from gkd.cluster.startup import Startup
from gkd.config.load import load_config
from gkd.errors import RankTimeout
from gkd.log import get_logger
from gkd.start.pools import worker_env
from tests.dist.slots import actor_slots

pytestmark = [pytest.mark.dist, pytest.mark.cpu_only("Ray's slots are logical CPUs")]

N_RANKS = 3
LATE = 2  # the rank that the others wait for


class Rank(ActorWorker):
    """A rank that joins the real process groups. Instead of building a student, all ranks but one enter a barrier."""

    def _build_student(self, total_steps: int, timeout_s: float) -> None:  # type: ignore[override]
        lines: list[str] = []
        install_cpu_shim()
        probe_groups(init_groups(self._layout), self._device, lines.append)
        # One tensor-parallel group of all ranks. Megatron creates it several times, under different names.
        assert lines and all(line.endswith(f"of ranks {list(range(N_RANKS))}") for line in lines), lines
        assert any("group tp " in line for line in lines) and any("intra_dist_opt " in line for line in lines), lines
        if self._rank == LATE:
            self._spans.enter("reading a hanging disk")
            read_from_a_dead_disk()
        self._spans.enter("at the barrier")
        dist.barrier()


def read_from_a_dead_disk() -> None:
    os.read(os.pipe()[0], 1)  # no process writes into the pipe


@pytest.fixture(scope="module")
def slots() -> Iterator[Pool]:
    with actor_slots(N_RANKS) as made:
        yield made


@pytest.fixture(scope="module")
def hung(slots: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[RankTimeout, HangReport, list[str], list[str]]:
    """Let a start time out. Return its error, the hang report, the log lines, and another report with the late rank
    stopped by a signal.
    """
    base = ["data.train_files=[a]", "model.path=m", f"trainer.run_dir={tmp_path_factory.mktemp('run')}"]
    config = load_config(None, [*base, f"trainer.n_gpus_per_node={N_RANKS}", f"actor.tp={N_RANKS}"])
    workers = slots.spawn(Rank, worker_env(on_cpu=True), concurrency_groups=CONCURRENCY_GROUPS)
    actor, lines, logger = ActorPool(workers, config), BufferingHandler(1000), get_logger("startup")
    gather({n: w.node_id.remote() for n, w in slots.named(workers).items()}, "process", 240)  # imports are slow
    startup = Startup(timeout_s=4, log_every_s=0.5)
    logger.addHandler(lines)
    with pytest.raises(RankTimeout) as raised, startup:
        startup.watch(slots.named(workers))
        gather(actor.init_model("cpu", 1, startup.left_s()), "init_model", startup.left_s())
    logger.removeHandler(lines)
    logged = [record.getMessage() for record in lines.buffer]
    report = hang_report(slots.run, startup.names, startup.poll(), raised.value.late)
    os.kill(next(int(line.split("pid ")[1].split(")")[0]) for line in report.lines if "disk" in line), signal.SIGSTOP)
    stopped = hang_report(slots.run, [*startup.names, "actor rank 9"], startup.poll(0.5), []).lines
    return raised.value, report, logged, stopped


@pytest.mark.parametrize(("left_s", "named"), [(0.01, True), (30.0, False)])
def test_wait_that_ends_just_before_the_deadline(left_s: float, named: bool) -> None:
    """Fails if rounding of Ray's time-outs hides the setting, or if an earlier time-out names it."""
    startup = Startup(timeout_s=left_s)
    with pytest.raises(RankTimeout) as raised, startup:
        raise RankTimeout("no answer", ["actor rank 0"])
    assert ("trainer.init_timeout_s" in str(raised.value)) == named


def test_error_names_the_setting_and_the_late_ranks(hung: tuple[RankTimeout, HangReport, list[str], list[str]]) -> None:
    """Fails if a hanging start does not end, or its error lacks the time-out or the ranks."""
    text = str(hung[0])
    assert "trainer.init_timeout_s = 4" in text
    assert all(f"actor rank {rank}" in text for rank in range(N_RANKS))


def test_report_separates_the_cause_from_waiting_ranks(
    hung: tuple[RankTimeout, HangReport, list[str], list[str]],
) -> None:
    """Fails if the report does not name the rank that causes the hang, and its line of code."""
    culprit, others = hung[1].lines
    assert culprit.startswith(f"actor rank {LATE} (") and "reading a hanging disk for" in culprit
    assert "(read_from_a_dead_disk)" in culprit
    assert "2 (actor rank 0, actor rank 1)" in others and "at the barrier" in others
    assert "barrier" not in hung[1].excerpt and "read_from_a_dead_disk" in hung[1].excerpt
    assert all(f"== actor rank {rank} (" in hung[1].stacks for rank in range(N_RANKS))
    assert hung[1].stacks.count("in barrier") == N_RANKS - 1


def test_start_up_lines_show_the_phase_of_each_rank(hung: tuple[RankTimeout, HangReport, list[str], list[str]]) -> None:
    """Fails if a long start logs nothing, or its lines do not match the phases of the ranks."""
    last = hung[2][-1]
    assert f" 0/{N_RANKS} " in last and re.search(r"\d+ s left$", last)
    assert "2 at the barrier (" in last
    assert f"actor rank {LATE} reading a hanging disk (" in last


def test_reason_for_a_missing_stack(hung: tuple[RankTimeout, HangReport, list[str], list[str]]) -> None:
    """Fails if a stopped process, or one that was never started, is left out or blocks the report."""
    lines = hung[3]
    assert any(line.startswith("actor rank 9: ") for line in lines)
    stopped = next(line for line in lines if line.startswith(f"actor rank {LATE} ("))
    assert "stopped by a signal" in stopped


def test_the_port_of_a_group_is_taken_when_it_is_announced() -> None:
    """Fails if another process can take it before the group is made: that start or weight sync would fail."""
    rank = ActorWorker(0)
    host, port = rank.rendezvous()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, port))
    assert dist.TCPStore(host, port, is_master=False, wait_for_workers=False).port == port
