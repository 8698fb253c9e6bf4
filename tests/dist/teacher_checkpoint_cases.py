"""Functions that run in the ranks of `test_teacher_checkpoint`: save and load a student, its teacher and reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gkd.actor.common.shard_writer import write
from gkd.config.load import load_config
from tests.device import host, rank_device
from tests.dist.frozen_cases import frozen_weights
from tests.dist.helpers import caught
from tests.dist.student_cases import build_student

STEP = 3  # of the checkpoint; not a multiple of the interval
EMA = ("teacher.update_interval=2", "teacher.update_ema=0.75", "teacher.signal=hidden")
COPY = ("teacher.update_interval=2",)
CASES = (
    ("ema", "qwen3", (*EMA, "reference.update_interval=1")),
    ("copy", "qwen3", (*COPY, "reference.update_interval=2")),
    ("tied", "qwen2_tied", EMA),
)


class Pair:
    """A student, its teacher and perhaps a reference, as in a worker."""

    def __init__(self, root: Path, rank: int, world_size: int, kind: str, overrides: tuple[str, ...]) -> None:
        from gkd.actor.frozen.rank_models import FrozenModels

        self.rank = rank
        local = ("teacher.backend=local", f"teacher.path={root / kind}_other", "model.dtype=float32")
        reference = ("distill.reference_kl_weight=1", f"reference.path={root / kind}_other", "model.path=unused")
        config = load_config(None, [*local, *overrides, *reference])
        self.student = build_student("fsdp2", root / kind, rank, world_size, signals=("hidden",))
        self.models = FrozenModels(config, self.student, rank_device(), f"rank {rank}")
        self.models.init_teacher()
        self.models.init_reference()
        self.frozen = [model for model in (self.models.teacher.model, self.models._reference) if model is not None]

    def step(self, number: int) -> None:
        """End a training step; its new weights do not matter here."""
        self.student.step = number
        self.models.after_step()

    def save(self, folder: Path) -> None:
        """Start the copy, refresh the teacher, and then write the files."""
        snapshot = self.models.add_to(self.student.snapshot())
        self.step(STEP + 1)
        write(folder, self.rank, snapshot)
        snapshot.release()

    def load(self, folder: Path) -> None:
        self.student.load_checkpoint(folder)
        self.models.load(folder)

    def weights(self) -> dict[str, np.ndarray]:
        return {f"{m.role} {name}": array for m in self.frozen for name, array in frozen_weights(m).items()}

    def residency(self) -> tuple[int, list[int]]:
        """Return the bytes on the device, and the addresses of this rank's shards."""
        shards = [param.to_local().data_ptr() for m in self.frozen for param in m.model.parameters()]  # type: ignore[attr-defined]
        return self.models.device_bytes(), shards


def save_them(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Write a checkpoint of each kind. Return the teachers' weights at the save, and one step later."""
    out: dict[str, Any] = {}
    for name, kind, overrides in CASES:
        pair = Pair(root, rank, world_size, kind, overrides)
        before = pair.residency()
        pair.step(2)
        out[f"{name} stays"] = pair.residency() == before
        pair.student.step = STEP
        at_save = pair.weights()
        pair.save(root / f"{name}_{world_size}")
        out[name] = [at_save, pair.weights()]
    alone = Pair(root, rank, world_size, "qwen3", COPY)
    write(root / f"alone_{world_size}", rank, alone.student.snapshot())
    return out


def load_them(rank: int, world_size: int, root: Path, saved_by: int) -> dict[str, Any]:
    """Load the checkpoints of `saved_by` ranks. Return the loaded weights, and the errors of wrong checkpoints."""
    out: dict[str, Any] = {}
    for name, kind, overrides in CASES:
        pair = Pair(root, rank, world_size, kind, overrides)
        before = pair.residency()
        pair.load(root / f"{name}_{saved_by}")
        loaded = pair.weights()
        out[f"{name} in place"] = pair.residency() == before
        if name == "ema":
            out["head"] = host(pair.student.loss.teacher_head).copy()
            out["refused"] = [
                caught(lambda p=pair, n=n: p.models.load(root / f"{n}_{saved_by}"))  # type: ignore[misc]
                for n in ("alone", "tied")
            ]
            pair.load(root / f"{name}_{saved_by}")
        pair.step(STEP + 1)
        out[name] = [loaded, pair.weights()]
    return out


def save_and_load(rank: int, world_size: int, root: Path) -> list[dict[str, Any]]:
    """Runs in a rank of two: one world for both, because imports are slow."""
    return [save_them(rank, world_size, root), load_them(rank, world_size, root, 1)]
