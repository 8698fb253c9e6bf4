"""Functions that run in the ranks of `test_frozen_model`: a local teacher with a student in two pipeline stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gkd.config.load import load_config
from gkd.data.scatter import map_selected
from tests.device import host, rank_device
from tests.dist.frozen_cases import CUT, frozen_weights, sequences
from tests.dist.helpers import caught
from tests.dist.megatron_reference import VOCAB
from tests.dist.student_cases import build_student

SETTINGS = {
    "both": ("teacher.topk=8", "distill.losses=[{name: k1}, {name: jsd}]"),
    "logits": ("teacher.signal=logits", "teacher.temperature=0.7"),
    "hidden": ("teacher.signal=hidden", "teacher.temperature=0.7"),
}
# By rank, the sequence_indices of a chunk with all sequences, and of one with the last three.
INDICES = [([0, 2, 4], []), ([6, 1, 3, 5], [2, 0, 1])]


def teach(rank: int, root: Path) -> dict[str, Any]:
    """Runs in a rank of two: return all results of the tests."""
    from gkd.actor.frozen.rank_models import LocalTeacher

    student = build_student("megatron", root / "qwen3", rank, 2, pp=2, signals=("hidden",))

    def teacher(*overrides: str, folder: str = "qwen3_other") -> LocalTeacher:
        local = ("teacher.backend=local", f"teacher.path={root / folder}", "model.dtype=float32")
        # The head covers the student's whole vocabulary.
        n_vocab = VOCAB if "teacher.signal=hidden" in overrides else CUT
        student.loss.shard = replace(student.loss.shard, n_valid=n_vocab)
        return LocalTeacher(load_config(None, [*local, *overrides]), student, rank_device())

    chunks = [sequences(), sequences()[-3:]]
    sequence_indices = [np.array(indices, "<i4").tobytes() for indices in INDICES[rank]]
    out: dict[str, Any] = {
        "scores": {k: map_selected(sequence_indices, chunks, teacher(*s).score) for k, s in SETTINGS.items()}
    }
    out["head"] = _head(student)
    follower = teacher("teacher.update_interval=2", "teacher.signal=hidden")
    before = weights(follower)
    student.step = 1
    follower.follower.after_step()
    out["kept"] = _equal(weights(follower), before)
    student.step = 2
    follower.follower.after_step()
    out["copied"] = weights(follower)
    out["head_copied"] = _head(student)
    average = teacher("teacher.update_interval=2", "teacher.update_ema=0.5", "teacher.signal=hidden")
    student.step = 4
    average.follower.after_step()
    out["average"] = weights(average)
    out["other architecture"] = caught(lambda: teacher("teacher.update_interval=1", folder="olmo2"))
    return out


def weights(teacher: Any) -> Any:
    return frozen_weights(teacher.model)


def _head(student: Any) -> np.ndarray | None:
    """Return a copy, because torch would share memory of this process."""
    head = student.loss.teacher_head
    return None if head is None else host(head).copy()


def _equal(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(array, two[name]) for name, array in one.items())
