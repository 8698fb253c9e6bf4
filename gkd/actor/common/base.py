"""What the actor's worker needs of a student, whichever backend trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gkd.actor.common.host_copies import Snapshot
from gkd.handles import TrainStats
from gkd.loss.distill_loss import DistillLoss
from gkd.memory.states import States
from gkd.types import MicroBatch


def no_phase(phase: str) -> None:
    """For a student that is built where nobody asks how far it is."""
    del phase


class Student(Protocol):
    """One rank of the student. But for `snapshot` every method is a collective over all ranks."""

    step: int  # optimizer steps made so far
    loss: DistillLoss
    states: States  # whoever has moved some away brings them back before a method that needs them

    @property
    def n_vocab(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def teacher_hidden_size(self) -> int | None:
        """D of the teacher's LM head, where there is one here."""
        ...

    def set_teacher_head(self, head: np.ndarray) -> None:
        """Takes [V, D] float32, the teacher's LM head, for the signal `hidden`."""
        ...

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> TrainStats:
        """One optimizer step on micro-batches in host memory. NumericsError: nothing has moved."""
        ...

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], on_rows: Callable[[Tensor], None] | None = None
    ) -> TrainStats:
        """The same loss, nothing learned; `on_rows` gets the numbers of each token."""
        ...

    def export_plan(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """(HF name, shape, dtype) of what `export` yields on this rank, in its order; moves no data."""
        ...

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under HF names, one at a time; every rank that takes part runs it to its end."""
        ...

    def save_hf(self, out_dir: str | Path, source_dir: str | Path) -> None:
        """Writes the whole student as a HF folder. ModelError: it cannot be written."""
        ...

    def snapshot(self) -> Snapshot:
        """This rank's share of what an exact resume needs. No collective; the next step waits for the copy."""
        ...

    def load_checkpoint(self, folder: str | Path) -> None:
        """Continues from the files of all ranks' snapshots. CheckpointError: they are damaged or of another student."""
        ...
