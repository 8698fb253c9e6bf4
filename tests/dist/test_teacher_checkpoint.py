"""A teacher and a reference that follow the student are restored bit-exactly, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dist.helpers import group_of_one, run_ranks
from tests.dist.megatron_reference import make_hf_folder
from tests.dist.teacher_checkpoint_cases import load_them, save_and_load, save_them

pytestmark = pytest.mark.dist
NAMES = ("ema", "copy", "tied")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("teacher_checkpoint")
    generator = torch.Generator().manual_seed(8)
    for kind in ("qwen3", "qwen2_tied"):
        make_hf_folder(root / kind, kind)
        other = make_hf_folder(root / f"{kind}_other", kind) / "model.safetensors"
        moved = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in load_file(other).items()}
        save_file(moved, other, metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def worlds(root: Path) -> dict[str, Any]:
    """Saved by two ranks and loaded by one, and the reverse. The one is this process: libraries load slowly."""
    by_one = alone(save_them, root)
    both = run_ranks(save_and_load, 2, root, timeout_s=120.0)
    on_one = alone(load_them, root, 2)
    return {"2 -> 1": (both[0][0], [on_one]), "1 -> 2": (by_one, [loaded for _, loaded in both])}


def alone(work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    with group_of_one():
        return work(0, 1, *args)


@pytest.mark.parametrize("way", ["2 -> 1", "1 -> 2"])
@pytest.mark.parametrize("name", NAMES)
def test_the_teacher_is_restored(worlds: dict[str, Any], way: str, name: str) -> None:
    """Fails if a resumed run has a different teacher, or a refresh during the copy changes the save."""
    saved, ranks = worlds[way]
    at_save, after_refresh = saved[name]
    changed = {key.split()[0] for key in at_save if (at_save[key] != after_refresh[key]).any()}
    assert changed == {"ema": {"teacher"}, "copy": set(), "tied": {"teacher"}}[name], "the next refresh changes it"
    for rank in ranks:
        for before, after in zip((at_save, after_refresh), rank[name], strict=True):
            assert before.keys() == after.keys()
            for key, array in before.items():
                np.testing.assert_array_equal(after[key], array, err_msg=key)


@pytest.mark.parametrize("way", ["2 -> 1", "1 -> 2"])
def test_a_load_is_in_place_and_the_student_gets_the_head(worlds: dict[str, Any], way: str) -> None:
    """Fails if a refresh or a load moves a model or allocates memory, or the student has the head of teacher.path."""
    saved, ranks = worlds[way]
    for rank in ranks:
        assert all(rank[f"{name} in place"] for name in NAMES) and all(saved[f"{name} stays"] for name in NAMES)
        np.testing.assert_array_equal(rank["head"], saved["ema"][0]["teacher lm_head.weight"])


@pytest.mark.parametrize("way", ["2 -> 1", "1 -> 2"])
def test_a_checkpoint_without_the_teacher_is_refused(worlds: dict[str, Any], way: str) -> None:
    """Fails if a run silently continues with the teacher of teacher.path, or with one of a different model."""
    _, ranks = worlds[way]
    for rank in ranks:
        without, other = rank["refused"]
        assert without[0] == "CheckpointError" and "teacher.update_interval" in without[1], without
        assert other[0] == "CheckpointError" and "teacher.path" in other[1], other
