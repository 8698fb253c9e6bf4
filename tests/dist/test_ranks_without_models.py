"""Real Ray actors of the real class, without models: memory metrics, out-of-memory errors, saves in the background.

A rank without memory in a reload: test_offload_barriers.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import torch

from gkd.actor.common.host_copies import HostCopies
from gkd.actor.common.shards import Piece
from gkd.actor.pool import ActorPool
from gkd.actor.worker import CONCURRENCY_GROUPS, ActorWorker
from gkd.cluster.calls import gather
from gkd.config.load import load_config
from gkd.errors import CheckpointError, ClusterError, OutOfMemory
from gkd.memory.states import States
from gkd.memory.usage import Timeline
from gkd.start.pools import worker_env
from tests.dist.slots import actor_slots
from tests.fake_device import FakeDevice
from tests.processes import wait_until
from tests.refusals import refuses

pytestmark = [pytest.mark.dist, pytest.mark.cpu_only("Ray's slots are logical CPUs")]

N_RANKS = 2


class Weights:
    """Replaces a student. Its device has 1 GiB on the first rank and 2 on the second during an export."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device, self.is_full = rank, FakeDevice(), False
        self.states = States(torch.device("cpu"), dict[str, list[torch.Tensor]])

    def save_hf(self, folder: Path, model: str, *, stop_ids: Sequence[int]) -> None:
        self.device.gib = 1 + self.rank

    def snapshot(self, *, copies: bool) -> HostCopies:
        if self.is_full and self.rank == 0:
            torch.empty(2**50)
        piece = Piece("w", "param", 0, 0, torch.full((1000,), float(self.rank)))
        return HostCopies(torch.device("cpu")).snapshot([piece], {"step": 1, "world_size": N_RANKS}, {})

    def load_checkpoint(self, folder: Path) -> None:
        self.device.gib = 0
        if self.rank == 1:
            torch.empty(2**50)


class Rank(ActorWorker):
    def _build_student(self, total_steps: int, timeout_s: float) -> Weights:  # type: ignore[override]
        student = Weights(self._rank)
        self._memory.timeline = Timeline(self._device, read=student.device.read, reset=student.device.reset_peak)
        return student

    def set_full(self, is_full: bool) -> None:
        self._student.is_full = is_full  # type: ignore[attr-defined]

    def hang(self, until: Path) -> None:
        """Be in a step that ends when the file exists."""
        wait_until(until.exists, 600.0, str(until))


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActorPool]:
    folder = tmp_path_factory.mktemp("run")
    base = ["data.train_files=[a]", "model.path=m", f"trainer.run_dir={folder}", f"trainer.n_gpus_per_node={N_RANKS}"]
    with actor_slots(N_RANKS) as slots:
        pool = ActorPool(
            slots.spawn(Rank, worker_env(on_cpu=True), concurrency_groups=CONCURRENCY_GROUPS), load_config(None, base)
        )
        gather(pool.init_model("cpu", 4, 240), "init_model", 240)
        yield pool


def test_metrics_are_the_largest_of_all_ranks(actor: ActorPool, tmp_path: Path) -> None:
    """Fails if a phase of the worker is not measured, the ranks' numbers are not merged, or are returned twice."""
    actor.export_hf(tmp_path)
    numbers = actor.memory_numbers()
    assert numbers.pop("memory/export/host_rss_gib") > 0.05
    assert numbers == {
        "memory/export/allocated_gib": 2.0,
        "memory/export/reserved_gib": 2.0,
        "memory/export/peak_gib": 2.0,
        "memory/export/peak_rank": 1.0,
    }
    assert actor.memory_numbers() == {}


def test_an_out_of_memory_error_is_diagnosed_on_the_driver(actor: ActorPool, tmp_path: Path) -> None:
    """Fails if a rank out of memory raises a bare traceback on the driver, or its report has no number or no fix."""
    with pytest.raises(OutOfMemory) as raised:
        actor.load(tmp_path)
    text = str(raised.value)
    assert text.startswith("actor rank 1 ") and "loading a checkpoint" in text and "4503599627370496 bytes" in text
    assert "gkd memory --config " in text
    ray.get([worker.set_full.remote(True) for worker in actor.workers])
    with pytest.raises(OutOfMemory, match=r"actor rank 0 .*saving a checkpoint"):
        actor.save(tmp_path / "saved")
    ray.get([worker.set_full.remote(False) for worker in actor.workers])


def test_the_ranks_and_the_driver_share_the_run_folder(actor: ActorPool, tmp_path: Path) -> None:
    """Fails if a run starts although a rank has no access to the run folder, or the probe files are not removed."""
    actor.check_run_dir(tmp_path, 240)
    assert not list(tmp_path.iterdir())
    with refuses("trainer.run_dir"):
        ray.get(actor.workers[1].check_run_dir.remote(tmp_path, "0" * 16))


def test_a_save_is_committed_while_a_rank_hangs(actor: ActorPool, tmp_path: Path) -> None:
    """Fails if a save is lost because a rank hangs in its step, or the driver waits for the end of that step."""
    folder = tmp_path / "actor"
    folder.mkdir()
    for worker in actor.workers:  # the second one may still write for the test before; the first one has no save
        with suppress(CheckpointError):
            ray.get(worker.save_finished.remote(True), timeout=30)
    actor.save(folder)
    until = tmp_path / "free"
    hung = [rank.hang.remote(until) for rank in actor.workers]
    try:
        began = time.monotonic()
        written = actor.save_finished(wait=True, timeout_s=30)  # the steps hang until this test ends
        seconds = time.monotonic() - began
        assert written is not None and sorted(written) == sorted(path.name for path in folder.iterdir())
        assert len(written) == N_RANKS
        assert not ray.wait(hung, num_returns=1, timeout=0)[0], "the steps still hang"
    finally:
        until.touch()
    print(f"returned after {seconds:.3f} s")


def test_a_save_that_hangs_is_a_timeout(actor: ActorPool, tmp_path: Path) -> None:
    """Fails if a disk that hangs keeps a failed run from ending. The disk is a pipe that is never read."""
    os.mkfifo(tmp_path / "rank_00001.safetensors")
    actor.save(tmp_path)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"save_finished.*actor rank 1"):
        actor.save_finished(wait=True, timeout_s=1.0)
    assert time.monotonic() - began < 60
