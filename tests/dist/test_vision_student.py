"""The student on images against plain transformers with AdamW: losses, and the weights after all steps.

Two ranks share each batch, and one of them has no image in the first step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gkd.types import Rollout, TeacherScores
from teacher_server.vision.images import EncodedImage
from teacher_server.vision.processor import ImageProcessor
from teacher_server.wire.table import TopKTable
from tests.dist.helpers import Measured, run_ranks
from tests.dist.megatron_reference import BETAS, CLIP, EPS, LR, WEIGHT_DECAY
from tests.dist.student_cases import as_numpy, build_student, weights
from tests.vision_models import picture, save_vision_model
from tests.vision_reference import TOWERS, train

N_STEPS, PER_STEP, K = 3, 6, 8
SIZES = ((56, 84), (84, 56), (60, 90))
# Model type, what becomes of the tower, packed, settings.
CASES: list[tuple[str, str, bool, dict[str, Any]]] = [
    ("llava", "trained", True, {}),
    ("llava", "frozen", False, {"cpu_offload": True}),
    ("qwen3_vl", "trained", False, {"recompute": "full"}),
    ("qwen3_vl", "frozen", True, {"fused_lm_head": False}),
    ("qwen2_5_vl", "trained", True, {}),
    ("qwen3_5", "trained", False, {}),
    ("internvl", "trained", True, {}),
    ("internvl", "frozen", False, {"recompute": "full"}),
    ("gemma3", "trained", False, {}),
    ("qwen3_vl", "trained", True, {"compiles": "on"}),
]
COMPILED = len(CASES) - 1


def make_sequences(folder: Path) -> list[list[tuple[Rollout, TeacherScores]]]:
    """Return the sequences of each step: of the first, every second one has images; samples share them."""
    rng, processor = np.random.default_rng(0), ImageProcessor(str(folder))
    images = [EncodedImage(picture(*size, seed)) for seed, size in enumerate(SIZES)]
    steps = []
    for step in range(N_STEPS):
        made = []
        for i in range(PER_STEP):
            own = () if step == 0 and i % 2 else tuple(images[: i % 3] or images[2:])
            places = [token for _ in own for token in (7, processor.token_id, 8)]
            text = [*rng.integers(1, 200, 5), *places, *rng.integers(1, 200, 3 + i)]
            ids = np.array(processor.expand([int(token) for token in text], own), np.int32)
            response = rng.integers(1, 200, 4 + i).astype(np.int32)
            table = np.sort(rng.dirichlet(np.ones(K + 1), len(response)).astype(np.float32)[:, :K])[:, ::-1]
            listed = np.stack([rng.permutation(200)[:K] for _ in response]).astype(np.int32)
            topk = TopKTable.without_tail(listed, np.log(table).astype(np.float32))
            common = {"rollout_logprobs": np.zeros(len(response), np.float32), "version_spans": (), "on_policy": False}
            rollout = Rollout(i, i, ids, response, finish_reason="length", images=own, **common)
            made.append((rollout, TeacherScores(topk)))
        steps.append(made)
    return steps


def _train(
    rank: int, world_size: int, folder: Path, case: int
) -> tuple[list[float], list[float], list[float], dict[str, Any]]:
    """Return the loss, gradient norm and number of image tokens of each step, and on rank 0 the weights."""
    from gkd.data.collate import MicroBatches

    _, vision, packed, settings = CASES[case]
    student = build_student("fsdp2", folder, rank, world_size, vision=vision, packing=packed, **settings)
    losses = []
    norms = []
    n_image_tokens = []
    for sequences in make_sequences(folder):
        own = sequences[rank::world_size]
        groups = [[0, 1], [2]] if len(own) == 3 else [[i] for i in range(len(own))]
        rollouts, scores = ([pair[k] for pair in own] for k in (0, 1))
        stats = student.train_step(MicroBatches(rollouts, scores, groups, packed=packed, pad_id=0))
        losses.append(stats.loss)
        norms.append(stats.grad_norm)
        n_image_tokens.append(stats.extra["rollout/image_tokens"])
        assert 0 < stats.extra["perf/image_wait_s"] < 60
    exported = as_numpy(weights(student))  # collective
    return losses, norms, n_image_tokens, exported if rank == 0 else {}


def _reference(folder: Path, vision: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = AutoImageProcessor.from_pretrained(folder)
    settings: dict[str, Any] = {"weight_decay": WEIGHT_DECAY, "clip": CLIP, "lr": LR, "betas": BETAS, "eps": EPS}
    numbers = train(model, processor, make_sequences(folder), frozen=vision == "frozen", **settings)
    return *numbers, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    def measure(case: int) -> Any:
        folder = tmp_path_factory.mktemp(f"case{case}")
        save_vision_model(folder, CASES[case][0])
        ranks = run_ranks(_train, 2, folder, case, timeout_s=600.0 if case == COMPILED else 60.0)
        return ranks, _reference(folder, CASES[case][1]), folder

    return Measured(measure)


@pytest.mark.dist
@pytest.mark.parametrize(
    "case",
    [*range(COMPILED), pytest.param(COMPILED, marks=pytest.mark.slow)],
    ids=lambda case: "-".join(map(str, CASES[case][:3])),
)
def test_a_student_on_images_equals_transformers(measured: Measured, case: int) -> None:
    """Fails if features, positions, borders of packs or gradients are others, or what shall be frozen is trained.

    Also if the metrics count the tokens of images twice, or on one rank alone.
    """
    ranks, (losses, norms, expected), folder = measured[case]
    steps = make_sequences(folder)
    token_id = ImageProcessor(str(folder)).token_id
    n_image_tokens = [sum(int((rollout.prompt_ids == token_id).sum()) for rollout, _ in step) for step in steps]
    for own_losses, own_norms, counted, _ in ranks:
        assert counted == n_image_tokens
        np.testing.assert_allclose(own_losses, losses, rtol=2e-6)
        np.testing.assert_allclose(own_norms, norms, rtol=2e-5)
    exported = ranks[0][-1]
    trains = CASES[case][1] == "trained"
    assert any(any(tower in name for tower in TOWERS) for name in exported) is trains
    tails = {_tail(name): weight for name, weight in expected.items()}
    for name, weight in exported.items():
        np.testing.assert_allclose(weight, tails[_tail(name)].numpy(), atol=2e-5, err_msg=name)


def _tail(name: str) -> str:
    """Return a tensor's name without the prefixes in which files and modules differ."""
    for word in ("vision_model.", "language_model.", "model."):
        name = name.replace(word, "")
    return name
