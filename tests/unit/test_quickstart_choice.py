"""The quickstart's settings by the number of GPUs; what the one-GPU settings need of a card, without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.quickstart.__main__ import choose_config, teacher_flags
from examples.quickstart.addition import build_tokenizer
from examples.quickstart.make_models import Recipe
from examples.quickstart.pretrain import ModelRecipe, build_model
from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.memory.footprint.fit import GIB, check
from gkd.preflight.machine import resolve_device
from tests.unit.test_footprint import ranks_of
from tests.unit.test_server_settings import settings_of

ROOT = Path(__file__).resolve().parents[2]
ONE_GPU = ROOT / "configs" / "quickstart_one_gpu.yaml"


def config_json(recipe: ModelRecipe) -> dict[str, Any]:
    """Return the config.json of one of the quickstart's models."""
    with torch.device("meta"):
        return build_model(recipe, build_tokenizer()).config.to_dict()


@pytest.mark.parametrize(("n_gpus", "n_wanted"), [(0, 2), (1, 1), (2, 2), (8, 2)])
def test_the_settings_follow_from_the_gpus(n_gpus: int, n_wanted: int, torch_sees: Callable[[int], None]) -> None:
    """Fails if the chosen settings are refused on that machine, need more GPUs, or leave the only GPU idle."""
    file, why = choose_config(n_gpus)
    config = load_config(ROOT / file)
    torch_sees(n_gpus)
    assert resolve_device(config) == ("cuda" if n_gpus else "cpu") and why
    assert check_config(config).n_gpus == n_wanted  # on the CPU: process slots
    of_teacher = settings_of("--model", "m", *teacher_flags(config)).teachers[0]
    assert of_teacher.device == ("cuda" if n_gpus == 1 else "cpu")
    if n_gpus == 1:
        assert of_teacher.gpu_memory_utilization == config.cluster.teacher_gpu_share == 0.1
        assert config.trainer.colocate and of_teacher.engine == "hf"


@pytest.mark.parametrize(("gib", "fits"), [(8, True), (139.8, True), (3, False)])
def test_the_one_gpu_settings_fit_a_small_card(gib: float, fits: bool) -> None:
    """Fails if the first run on a common card ends out of memory, or a phase leaves out the teacher."""
    config, gpu_bytes = load_config(ONE_GPU), round(gib * GIB)
    student = config_json(Recipe().student)
    found = ranks_of(config, student, gpu_bytes=gpu_bytes)
    assert found[0].parts["teacher_server"] == round(0.1 * gpu_bytes)
    assert (check(found, gpu_bytes, config) == []) == fits
    larger = config.with_values({"cluster.teacher_gpu_share": 0.7})
    assert check(ranks_of(larger, student, gpu_bytes=gpu_bytes), gpu_bytes, larger) != []
