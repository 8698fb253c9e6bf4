"""Saves in the background, on real Ray actors of the real class, without models."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from gkd.actor.common.host_copies import HostCopies
from gkd.actor.common.shards import Piece
from gkd.actor.pool import ActorPool
from gkd.actor.worker import CONCURRENCY_GROUPS, ActorWorker
from gkd.config.load import load_config
from gkd.errors import CheckpointError, ClusterError
from gkd.start.pools import worker_env
from tests.dist.slots import actor_slots
from tests.processes import wait_until
from tests.refusals import refuses

pytestmark = [pytest.mark.dist, pytest.mark.cpu_only("Ray's slots are logical CPUs")]

N_RANKS = 2


class Rank(ActorWorker):
    """A rank with a snapshot instead of a student, and a step that hangs until a file exists."""

    def save(self, folder: Path, blocking: bool = False) -> None:
        del blocking
        piece = Piece("w", "param", 0, 0, torch.full((1000,), float(self._rank)))
        snapshot = HostCopies(torch.device("cpu")).snapshot([piece], {"step": 1, "world_size": N_RANKS}, {})
        self._writer.start(folder, self._rank, snapshot)

    def hang(self, until: Path) -> None:
        wait_until(until.exists, 600.0, str(until))


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[object]]:
    with actor_slots(N_RANKS) as slots:
        yield slots.spawn(Rank, worker_env(on_cpu=True), concurrency_groups=CONCURRENCY_GROUPS)


def pool(ranks: list[object], tmp_path: Path) -> ActorPool:
    base = ["data.train_files=[a]", "model.path=m", f"trainer.run_dir={tmp_path}"]
    return ActorPool(ranks, load_config(None, [*base, f"trainer.n_gpus_per_node={N_RANKS}"]))


def test_the_ranks_and_the_driver_share_the_run_folder(ranks: list[object], tmp_path: Path) -> None:
    """Fails if a run starts although a rank has no access to the run folder, or the probe files are not removed."""
    actor = pool(ranks, tmp_path)
    actor.check_run_dir(tmp_path, 60)
    assert not list(tmp_path.iterdir())
    with refuses("trainer.run_dir"):
        ray.get(ranks[1].check_run_dir.remote(tmp_path, "0" * 16))  # type: ignore[attr-defined]


def test_a_save_is_committed_while_a_rank_hangs(ranks: list[object], tmp_path: Path) -> None:
    """Fails if a save is lost because a rank hangs in its step, or the driver waits for the end of that step."""
    actor, folder = pool(ranks, tmp_path), tmp_path / "actor"
    folder.mkdir()
    with pytest.raises(CheckpointError):
        actor.save_finished(wait=True, timeout_s=30)
    actor.save(folder)
    until = tmp_path / "free"
    hung = [rank.hang.remote(until) for rank in ranks]  # type: ignore[attr-defined]
    try:
        began = time.monotonic()
        written = actor.save_finished(wait=True, timeout_s=3)
        seconds = time.monotonic() - began
        assert written is not None and sorted(written) == sorted(path.name for path in folder.iterdir())
        assert len(written) == N_RANKS
        assert not ray.wait(hung, num_returns=1, timeout=0)[0], "the steps still hang"
    finally:
        until.touch()
    print(f"returned after {seconds:.3f} s")


def test_a_save_that_hangs_is_a_timeout(ranks: list[object], tmp_path: Path) -> None:
    """Fails if a disk that hangs keeps a failed run from ending. The disk is a pipe that is never read."""
    os.mkfifo(tmp_path / "rank_00001.safetensors")
    actor = pool(ranks, tmp_path)
    actor.save(tmp_path)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"save_finished.*actor rank 1"):
        actor.save_finished(wait=True, timeout_s=1.0)
    assert time.monotonic() - began < 5
