"""Functions that run in the ranks of `test_teacher_checkpoint`: save and load a student and its teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gkd.actor.common.optim_spec import OptimSpec
from gkd.actor.common.shard_writer import write
from gkd.config.load import load_config
from gkd.config.loss_spec import LossSpec
from tests.dist.frozen_cases import frozen_weights
from tests.dist.helpers import caught
from tests.dist.megatron_reference import BETAS, CLIP, EPS, LR, WEIGHT_DECAY
from tests.dist.student_cases import CPU

STEP = 3  # of the checkpoint; not a multiple of the interval
EMA = ("teacher.update_interval=2", "teacher.update_ema=0.75", "teacher.signal=hidden")
COPY = ("teacher.update_interval=2",)


class Pair:
    """A student and its teacher, as in a worker."""

    def __init__(self, root: Path, rank: int, world_size: int, kind: str, overrides: tuple[str, ...]) -> None:
        from gkd.actor.frozen.teacher import LocalTeacher
        from gkd.actor.fsdp.student import FsdpStudent
        from gkd.actor.megatron.layout import ParallelLayout

        self.rank = rank
        local = ("teacher.backend=local", f"teacher.path={root / kind}_other", "model.dtype=float32")
        config = load_config(None, [*local, *overrides])
        self.student = FsdpStudent(
            root / kind,
            optim=OptimSpec(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip_grad=CLIP),
            loss=LossSpec(),
            signals=("hidden",),
            dtype=torch.float32,
            device=CPU,
            seed=1,
        )
        layout = ParallelLayout(tp=1, pp=1, world_size=world_size, rank=rank)
        self.teacher = LocalTeacher(config, self.student, layout, CPU, self.student.n_vocab)

    def step(self, number: int) -> None:
        """End a training step; its new weights do not matter here."""
        self.student.step = number
        self.teacher.after_step()

    def save(self, folder: Path) -> None:
        """Start the copy, refresh the teacher, and then write the files."""
        snapshot = self.teacher.add_to(self.student.snapshot())
        self.step(STEP + 1)
        write(folder, self.rank, snapshot)
        snapshot.release()

    def load(self, folder: Path) -> None:
        self.student.load_checkpoint(folder)
        self.teacher.load(folder)

    def weights(self) -> dict[str, np.ndarray]:
        return frozen_weights(self.teacher._model)

    def head(self) -> np.ndarray:
        head = self.student.loss.teacher_head
        assert head is not None
        return head.numpy().copy()


def save_them(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Write a checkpoint of each kind. Return the teachers' weights at the save, and one step later."""
    out: dict[str, Any] = {}
    for name, kind, overrides in (("ema", "qwen3", EMA), ("copy", "qwen3", COPY), ("tied", "qwen2_tied", EMA)):
        pair = Pair(root, rank, world_size, kind, overrides)
        pair.step(2)
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
    for name, kind, overrides in (("ema", "qwen3", EMA), ("copy", "qwen3", COPY), ("tied", "qwen2_tied", EMA)):
        pair = Pair(root, rank, world_size, kind, overrides)
        addresses = [param.to_local().data_ptr() for param in pair.teacher._model.model.parameters()]  # type: ignore[attr-defined]
        pair.load(root / f"{name}_{saved_by}")
        loaded = pair.weights()
        out[f"{name} in place"] = addresses == [p.to_local().data_ptr() for p in pair.teacher._model.model.parameters()]  # type: ignore[attr-defined]
        if name == "ema":
            out["head"] = pair.head()
            out["refused"] = [
                caught(lambda p=pair, n=n: p.teacher.load(root / f"{n}_{saved_by}"))  # type: ignore[misc]
                for n in ("alone", "tied")
            ]
            pair.load(root / f"{name}_{saved_by}")
        pair.step(STEP + 1)
        out[name] = [loaded, pair.weights()]
    return out


def save_and_load(rank: int, world_size: int, root: Path) -> list[dict[str, Any]]:
    """Runs in a rank of two: one world for both, because imports are slow."""
    return [save_them(rank, world_size, root), load_them(rank, world_size, root, 1)]
