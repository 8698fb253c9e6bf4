"""Shards in one run of host memory: the same model, in no more bytes than it has. Two ranks, nothing pinned.

What this does not prove: that CUDA pins such a run, and that copies from it overlap with the GPU (tests/gpu).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.frozen_cases import PLAIN, build, frozen_weights, sequences
from tests.dist.helpers import run_ranks
from tests.dist.hf_models import make_model_folder
from tests.dist.megatron_reference import make_hf_folder, make_micro_batches
from tests.dist.student_cases import build_student, same_weights, share, weights

pytestmark = pytest.mark.dist
KINDS = ("qwen3", "qwen2_tied", "mixtral")
N_RANKS = 2
_ROUNDING = 64  # bytes a shard


def measure(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Runs in a rank: frozen models and a student, each as it is and in one run."""
    from gkd.actor.fsdp.model import into_one_block

    out: dict[str, Any] = {}
    batch = sequences()[rank::world_size]
    for kind in KINDS:
        plain, moved = build(root / kind), build(root / kind)
        run = into_one_block(moved.model, pinned=False)
        found = []
        for model in (plain, moved):
            scores = [model.score(batch, PLAIN)]
            doubled = [(name, torch.from_numpy(2 * array)) for name, array in frozen_weights(model).items()]
            model.refresh(iter(doubled), 0.5)
            scores.append(model.score(batch, PLAIN))
            found.append(([each[0] for part in scores for each in part], frozen_weights(model)))
        out[kind] = {"found": found, "bytes": run.nbytes, "inside": _inside(moved.model, run)}
        out[kind]["own"] = sum(_padded(param) for param in moved.model.parameters())
        out[kind]["n"] = sum(1 for _ in moved.model.parameters())
    students = [build_student("fsdp2", root / "qwen3", rank, world_size, cpu_offload=True) for _ in range(2)]
    run = into_one_block(students[1].model, pinned=False)
    losses = [
        [student.train_step(share(make_micro_batches(step), rank, world_size)).loss for step in range(3)]
        for student in students
    ]
    out["student"] = [losses[0] == losses[1], same_weights(*(weights(student) for student in students))]
    out["student"].append(_inside(students[1].model, run))
    return out


def _inside(model: torch.nn.Module, run: torch.Tensor) -> bool:
    """Return whether all shards are in the block, also after forward passes."""
    locals_ = [param.to_local() for param in model.parameters()]  # type: ignore[attr-defined]
    return all(local.untyped_storage().data_ptr() == run.data_ptr() for local in locals_)


def _padded(param: torch.Tensor) -> int:
    """Bytes of the shard as fully_shard cuts it: equal parts, the last one filled up."""
    return -(-param.shape[0] // N_RANKS) * (param.numel() // param.shape[0]) * param.itemsize


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("host_run")
    for kind in ("qwen3", "qwen2_tied"):
        make_hf_folder(root / kind, kind)
    make_model_folder(root / "mixtral", "mixtral")
    return run_ranks(measure, N_RANKS, root, timeout_s=150.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_one_run_is_the_same_model(ranks: list[dict[str, Any]], kind: str) -> None:
    """Fails if a shard, its padding or a tied one lands on another's bytes, or a refresh misses the new memory."""
    for rank in ranks:
        (scores, plain), (moved_scores, moved) = rank[kind]["found"]
        assert len(scores) == len(moved_scores) > 0
        for one, two in zip(scores, moved_scores, strict=True):
            np.testing.assert_array_equal(one, two)
        for name, array in plain.items():
            np.testing.assert_array_equal(array, moved[name], err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_it_takes_its_bytes_and_stays_there(ranks: list[dict[str, Any]], kind: str) -> None:
    """Fails if pinned memory is more than what the footprint counts, or fully_shard gives the shards other memory."""
    for rank in ranks:
        found = rank[kind]
        assert found["inside"] and found["own"] <= found["bytes"] < found["own"] + _ROUNDING * found["n"]


def test_a_student_learns_in_it(ranks: list[dict[str, Any]]) -> None:
    """Fails if the optimizer steps on the old memory, or gradients are added to another shard."""
    for rank in ranks:
        assert rank["student"] == [True, True, True]
