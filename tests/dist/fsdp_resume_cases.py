"""Save and resume the FSDP2 student inside the ranks, for `test_fsdp_student`.

A world of two ranks saves and resumes. A world of one resumes its checkpoints, and vice versa.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from gkd.actor.common.shard_writer import write
from tests.dist.helpers import group_of_one
from tests.dist.megatron_reference import make_micro_batches
from tests.dist.peft_reference import LORA
from tests.dist.resume_cases import LAST, SAVED_AT, exported, late_snapshot, leave_out, weights
from tests.dist.student_cases import build_student, share

SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "offloaded": {"cpu_offload": True}, "lora": {"lora": LORA}}
# (settings of the student that saved, of the one that resumes)
SAME_WORLD = [("plain", "offloaded"), ("offloaded", "plain"), ("lora", "lora")]
OTHER_WORLD = [("plain", "plain"), ("lora", "lora")]


def save_all(root: Path, rank: int, world_size: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """Train one student per name, and save it concurrently."""
    results = {}
    for name in names:
        student = _student(root, rank, world_size, name)
        _train(student, 0, SAVED_AT - 1)
        leave_out(student)
        saved = weights(student)
        snapshot = late_snapshot(student) if name == names[0] else student.snapshot()
        losses = _train(student, SAVED_AT, LAST)
        write(_folder(root, world_size, name), rank, snapshot)
        dist.barrier()
        assert exported(_folder(root, world_size, name), root / "qwen3") == saved
        results[name] = {"saved": saved, "losses": losses, "final": weights(student)}
    return results


def resume_all(
    root: Path, rank: int, world_size: int, pairs: list[tuple[str, str]], *, saved_by: int
) -> dict[tuple[str, str], dict[str, Any]]:
    """Resume what a world of `saved_by` ranks saved, and continue training."""
    results = {}
    for saved, resumed in pairs:
        student = _student(root, rank, world_size, resumed)
        student.load_checkpoint(_folder(root, saved_by, saved))
        result = {"step": student.step, "saved": weights(student), "losses": _train(student, SAVED_AT, LAST)}
        results[saved, resumed] = result | {"final": weights(student)}
    return results


def in_two(root: Path, rank: int) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """Return (saves, resumes of them, resumes of what one rank saved) of the world of two ranks."""
    saves = save_all(root, rank, 2, list(SETTINGS))
    resumes = resume_all(root, rank, 2, SAME_WORLD, saved_by=2)
    return saves, resumes, resume_all(root, rank, 2, OTHER_WORLD, saved_by=1)


def save_in_one(root: Path) -> dict[str, Any]:
    """Save in a world of one rank, which is this process."""
    with group_of_one():
        return save_all(root, 0, 1, [saved for saved, _ in OTHER_WORLD])


def resume_in_one(root: Path) -> dict[Any, Any]:
    """Resume what two ranks saved in a world of one rank, which is this process."""
    with group_of_one():
        return resume_all(root, 0, 1, OTHER_WORLD, saved_by=2)


def _student(root: Path, rank: int, world_size: int, name: str) -> Any:
    return build_student("fsdp2", root / "qwen3", rank, world_size, packing=False, **SETTINGS[name])


def _train(student: Any, first: int, last: int) -> list[float]:
    """Return the losses of steps [first, last), each on this rank's share."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [student.train_step(share(make_micro_batches(step), rank, world_size)).loss for step in range(first, last)]


def _folder(root: Path, world_size: int, name: str) -> Path:
    return root / f"ckpt_{world_size}_{name}"
