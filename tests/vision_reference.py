"""Compute sequences with images with plain transformers, and train on them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gkd.types import Rollout, TeacherScores, TeacherTopK

TOWERS = ("visual", "vision_tower", "multi_modal_projector")


def logits_of(model: Any, processor: Any, rollout: Rollout) -> Tensor:
    """Return [R, V], of the response."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids]).astype(np.int64))[None]
    inputs: dict[str, Any] = {}
    if rollout.images:
        pictures = [Image.open(io.BytesIO(image.data)).convert("RGB") for image in rollout.images]
        tiles = {"crop_to_patches": True} if model.config.model_type == "internvl" else {}  # as InternVLProcessor
        inputs = dict(processor(images=pictures, return_tensors="pt", **tiles))
        inputs.pop("num_patches", None)
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logits: Tensor = model(input_ids=ids, **inputs).logits[0, len(rollout.prompt_ids) - 1 : -1]
    return logits


def loss_of(logits: Tensor, topk: TeacherTopK) -> Tensor:
    """Return the sum of KL(teacher || student) with the rest of the probability as one outcome."""
    log_q = logits.double().log_softmax(-1)
    listed = log_q.gather(1, torch.from_numpy(topk.topk_ids.astype(np.int64)))
    log_p = torch.from_numpy(topk.topk_logprobs).double()
    tail = torch.from_numpy(topk.tail_mass).double().clamp(min=1e-30)
    rest = torch.log1p(-listed.exp().sum(-1).clamp(max=1 - 1e-12))
    return (log_p.exp() * (log_p - listed)).sum() + (tail * (tail.log() - rest)).sum()


def train(
    model: Any,
    processor: Any,
    steps: Sequence[Sequence[tuple[Rollout, TeacherScores]]],
    *,
    frozen: bool,
    weight_decay: float,
    clip: float,
    see: Callable[[int, Rollout, TeacherScores, Tensor], None] = lambda *_: None,
    **adamw: Any,
) -> tuple[list[float], list[float]]:
    """Train on the sequences of each step, and return losses and gradient norms.

    Args:
        see: gets the step, counted from 1, a sequence, and its logits.
        adamw: settings of the optimizer.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and any(tower in name for tower in TOWERS)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, **adamw)
    losses = []
    norms = []
    for step, sequences in enumerate(steps, 1):
        n_tokens = sum(rollout.n_own for rollout, _ in sequences)
        losses.append(0.0)
        for rollout, scores in sequences:
            assert scores.topk is not None
            logits = logits_of(model, processor, rollout)
            loss = loss_of(logits, scores.topk) / n_tokens
            loss.backward()
            losses[-1] += float(loss.detach())
            see(step, rollout, scores, logits.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms
