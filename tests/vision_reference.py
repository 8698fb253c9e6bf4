"""What plain transformers computes of sequences with images."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gkd.types import Rollout, TeacherTopK

TOWERS = ("visual", "vision_tower", "multi_modal_projector")


def logits_of(model: Any, processor: Any, rollout: Rollout) -> Tensor:
    """Return [R, V], of the response."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids]).astype(np.int64))[None]
    inputs: dict[str, Any] = {}
    if rollout.images:
        pictures = [Image.open(io.BytesIO(image.data)).convert("RGB") for image in rollout.images]
        inputs = dict(processor(images=pictures, return_tensors="pt"))
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
