"""Memory metrics and out-of-memory diagnosis of real Ray actors of the real class, without models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from gkd.actor.pool import ActorPool
from gkd.actor.worker import CONCURRENCY_GROUPS, ActorWorker
from gkd.cluster.calls import gather
from gkd.config.load import load_config
from gkd.errors import OutOfMemory
from gkd.memory.states import PARAMS, States
from gkd.memory.usage import Timeline
from gkd.start.pools import worker_env
from tests.dist.slots import actor_slots
from tests.fake_device import FakeDevice

pytestmark = [pytest.mark.dist, pytest.mark.cpu_only("Ray's slots are logical CPUs")]

N_RANKS = 2


class Weights:
    """Replaces a student. Its device has 1 GiB on the first rank and 2 on the second during an export."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, FakeDevice()
        self.moving: dict[str, list[torch.Tensor]] = {}
        self.states = States(torch.device("cpu"), lambda: self.moving)

    def save_hf(self, folder: Path, model: str) -> None:
        self.device.gib = 1 + self.rank

    def snapshot(self, *, copies: bool) -> None:
        if self.rank == 0:
            torch.empty(2**50)

    def load_checkpoint(self, folder: Path) -> None:
        self.device.gib = 0
        if self.rank == 1:
            torch.empty(2**50)


class Rank(ActorWorker):
    def _build_student(self, total_steps: int, timeout_s: float) -> Weights:  # type: ignore[override]
        student = Weights(self._rank)
        self._memory.timeline = Timeline(self._device, read=student.device.read, reset=student.device.reset_peak)
        return student

    def make_states(self, *, scarce: bool) -> None:
        """Add a tensor that moves; with `scarce`, there is no memory to reload it."""
        self._student.moving[PARAMS] = [torch.ones(1000)]  # type: ignore[attr-defined]
        real = torch.UntypedStorage.resize_

        def too_much(storage: torch.UntypedStorage, n_bytes: int) -> object:
            return real(storage, 2**60 if n_bytes else 0)

        if scarce:
            torch.UntypedStorage.resize_ = too_much  # type: ignore[method-assign,assignment]


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActorPool]:
    folder = tmp_path_factory.mktemp("run")
    base = ["data.train_files=[a]", "model.path=m", f"trainer.run_dir={folder}", f"trainer.n_gpus_per_node={N_RANKS}"]
    with actor_slots(N_RANKS) as slots:
        pool = ActorPool(
            slots.spawn(Rank, worker_env(on_cpu=True), concurrency_groups=CONCURRENCY_GROUPS), load_config(None, base)
        )
        gather(pool.init_model("cpu", 4, 60), "init_model", 60)
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
    """Fails if a rank out of memory raises a bare traceback on the driver, or its report is not in the run folder."""
    with pytest.raises(OutOfMemory) as raised:
        actor.load(tmp_path)
    text = str(raised.value)
    assert text.startswith("actor rank 1 ") and "loading a checkpoint" in text and "4194304.00 GiB" in text
    assert f"trainer.n_gpus_per_node={N_RANKS}" in text
    (line,) = (line for line in text.splitlines() if line.startswith("saved: "))
    assert json.loads(Path(line.removeprefix("saved: ")).read_text())["who"] == "actor rank 1"
    with pytest.raises(OutOfMemory, match=r"actor rank 0 .*saving a checkpoint"):
        actor.save(tmp_path / "saved")


def test_an_out_of_memory_error_during_a_reload_is_diagnosed_first(actor: ActorPool) -> None:
    """Fails if another rank raises the error on the driver before this rank has written its diagnosis."""
    ray.get([worker.make_states.remote(scarce=rank == 0) for rank, worker in enumerate(actor.workers)])
    actor.offload_states()
    with pytest.raises(OutOfMemory) as raised:
        actor.reload_states()
    text = str(raised.value)
    assert text.startswith("actor rank 0 ") and "reloading states" in text and "1073741824.00 GiB" in text
    (line,) = (line for line in text.splitlines() if line.startswith("saved: "))
    assert json.loads(Path(line.removeprefix("saved: ")).read_text())["phase"] == "reloading states"
