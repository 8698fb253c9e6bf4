"""Start both pools with the real launcher, and stop when all ranks are about to build their models."""

from __future__ import annotations

import os
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch

from gkd.actor.worker import ActorWorker
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import GkdError
from gkd.preflight.run import Plan
from gkd.rollout.engine.worker import RolloutWorker
from gkd.run.open import open_run_folder
from gkd.scoring.teacher.info import TeacherInfo
from gkd.start import launcher
from gkd.text.comparison import Comparison
from tests.processes import wait_until

pytestmark = [pytest.mark.dist, pytest.mark.cpu_only("Ray's slots are logical CPUs")]

# Name of each rank -> its GPU. The actor gets the first ids.
GPUS = {"actor worker 0": 2, "rollout worker 0": 5}
LIMIT_S = 60.0
TEACHER = TeacherInfo("t", "t", "t", "f", 9, 9, "", 99, 1, 1, "hf", "cpu", "float32", True)


class Met(GkdError):
    """All ranks were there at the same time."""


def meet(name: str, lines: BufferingHandler, folder: Path) -> None:
    """Write what this rank has logged, and wait for the files of all others. Raises Met."""
    part = folder / f"{name}.part"
    part.write_text("\n".join(record.getMessage() for record in lines.buffer))
    part.rename(folder / f"{name}.met")
    wait_until(lambda: len(list(folder.glob("*.met"))) == len(GPUS), LIMIT_S, f"{name} is alone")
    raise Met(name)


class Rank(ActorWorker):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._lines = BufferingHandler(1000)
        self._log.addHandler(self._lines)

    def _build_student(self, total_steps: int, timeout_s: float) -> Any:
        meet(f"actor worker {self._rank}", self._lines, Path(self._config.trainer.run_dir))


class Engine(RolloutWorker):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._lines = BufferingHandler(1000)
        self._log.addHandler(self._lines)

    def _set_up(self, config: Config, device: torch.device, run_dir: Path) -> None:
        super()._set_up(config, device, run_dir)
        meet(f"rollout worker {self._rank}", self._lines, run_dir)


def test_both_pools_start_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a pool builds its models only when the other one has, a rank does not log its GPUs first, or the setting
    cluster.gpus affects other processes of the driver, such as a teacher on other GPUs.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    settings = ["data.train_files=[a]", "model.path=m", f"trainer.run_dir={tmp_path}", "cluster.gpus=[5,2]"]
    settings += ["teacher.backend=local", "teacher.path=t"]
    config = load_config(None, settings)
    folder = open_run_folder(config, {"name": "t", "fingerprint": "f"})
    plan = Plan("cpu", [1], [], [], (TEACHER,), Comparison(9), 1, config, [], folder)
    for name, worker in (("ActorWorker", Rank), ("RolloutWorker", Engine)):
        monkeypatch.setattr(launcher, name, worker)
    with pytest.raises(Met), launcher.started_roles(plan):
        pass
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5"
    assert {file.stem for file in tmp_path.glob("*.met")} == GPUS.keys()
    for name, gpu in GPUS.items():
        first = (tmp_path / f"{name}.met").read_text().partition("\n")[0]
        assert first.startswith(name) and f"CUDA_VISIBLE_DEVICES={gpu}," in first
