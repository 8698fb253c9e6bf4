"""Gradients that are reduced during the backward pass, on two ranks, against reducing them after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.helpers import run_ranks
from tests.dist.megatron_reference import make_hf_folder, make_micro_batches
from tests.dist.student_cases import as_numpy, build_student, share, step_in_parts, weights

pytestmark = pytest.mark.dist
KINDS = ("qwen2_tied", "qwen3")  # an LM head with the embedding's weights, and one of its own


def _train(rank: int, world_size: int, root: Path) -> dict[tuple[str, bool], dict[str, Any]]:
    from megatron.core import parallel_state

    found = {}
    for kind in KINDS:
        for overlaps in (False, True):
            student = build_student("megatron", root / kind, rank, world_size, overlap_grad_reduce=overlaps)
            assert student._ddps[0].ddp_config.overlap_grad_reduce == overlaps
            for step in range(3):  # in the second one this rank or the other has no micro-batch
                mine = share(make_micro_batches(step), rank, world_size)
                student.train_step(mine if step != 1 or rank == 1 else [])
            step_in_parts(student, share(make_micro_batches(3), rank, world_size))
            found[kind, overlaps] = as_numpy(weights(student))
            parallel_state.destroy_model_parallel()
    return found


def test_overlapped_reduction_changes_nothing(tmp_path: Path) -> None:
    """Fails if a gradient is reduced before it is complete, by a part of a batch or of a backward pass, that of
    the LM head is missing or added twice, or a rank without micro-batches blocks the other.
    """
    for kind in KINDS:
        make_hf_folder(tmp_path / kind, kind)
    for found in run_ranks(_train, 2, tmp_path, timeout_s=120.0):
        for kind in KINDS:
            overlapped, plain = found[kind, True], found[kind, False]
            assert overlapped.keys() == plain.keys()
            assert all((overlapped[name] == weight).all() for name, weight in plain.items())
