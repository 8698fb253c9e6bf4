"""Compute sequences with images with plain transformers, and train on them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from PIL import Image
from torch import Tensor

from gkd.actor.common.lora import first_a
from gkd.types import Rollout, TeacherScores
from teacher_server.wire.table import TopKTable

TOWERS = ("visual", "vision_tower", "multi_modal_projector")


def logits_of(model: Any, processor: Any, rollout: Rollout) -> Tensor:
    """Return [R, V], of the response."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids]).astype(np.int64))[None]
    inputs: dict[str, Any] = {}
    if rollout.images:
        pictures = [Image.open(io.BytesIO(image.data)).convert("RGB") for image in rollout.images]
        tiles = {"crop_to_patches": True} if model.config.model_type == "internvl" else {}  # as InternVLProcessor
        inputs = dict(processor(images=pictures, return_tensors="pt", **tiles))
        inputs = {name: value for name, value in inputs.items() if name not in ("num_patches", "num_crops")}
        if model.config.model_type == "gemma3":
            inputs["token_type_ids"] = (ids == model.config.image_token_id).int()
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logits: Tensor = model(input_ids=ids, **inputs).logits[0, len(rollout.prompt_ids) - 1 : -1]
    return logits


def loss_of(logits: Tensor, topk: TopKTable) -> Tensor:
    """Return the sum of KL(teacher || student) with the rest of the probability as one outcome."""
    listed = logits.double().log_softmax(-1).gather(1, torch.from_numpy(topk.ids.astype(np.int64)))
    log_p = torch.from_numpy(topk.logprobs).double()
    tail = torch.from_numpy(topk.tail).double().clamp(min=1e-30)
    rest = torch.log1p(-listed.exp().sum(-1).clamp(max=1 - 1e-12))
    return (log_p.exp() * (log_p - listed)).sum() + (tail * (tail.log() - rest)).sum()


def reference_loss_of(logits: Tensor, reference: Tensor, rollout: Rollout) -> Tensor:
    """Return the sum of rho k3, with the gradient of the reverse KL: docs/losses.md, section reference model."""
    ids = torch.from_numpy(rollout.response_ids.astype(np.int64))[:, None]
    log_q, log_r = (each.double().log_softmax(-1).gather(1, ids)[:, 0] for each in (logits, reference))
    now = log_q.detach()
    rho = (now - torch.from_numpy(rollout.rollout_logprobs)).exp().clamp(max=2)
    value = rho * (torch.expm1(log_r - now) - (log_r - now))
    return (value + rho * (now - log_r) * (log_q - now)).sum()


def add_adapters(model: Any, rank: int, alpha: float, seed: int) -> Any:
    """Return the model with peft's adapters of its language model; their first values are those of a run's student."""
    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=r".*language_model\..*_proj")
    adapted = get_peft_model(model, settings)
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted.modules():
        if isinstance(layer, LoraLayer):
            first = layer.lora_A["default"].weight
            first.data = first_a(tuple(first.shape), generator)
    return adapted


def train(
    model: Any,
    processor: Any,
    steps: Sequence[Sequence[tuple[Rollout, TeacherScores]]],
    *,
    frozen: bool,
    weight_decay: float,
    clip: float,
    reference: Any = None,
    reference_weight: float = 0.0,
    see: Callable[[int, Rollout, TeacherScores], None] = lambda *_: None,
    **adamw: Any,
) -> tuple[list[float], list[float]]:
    """Train on the sequences of each step, and return losses and gradient norms. Of adapters only they are trained.

    Args:
        reference: a model to stay close to.
        see: is called with the step, counted from 1, and a sequence, before the step changes weights.
        adamw: settings of the optimizer.
    """
    adapted = any(isinstance(module, LoraLayer) for module in model.modules())
    for name, parameter in model.named_parameters():
        is_frozen = "lora_" not in name if adapted else frozen and any(tower in name for tower in TOWERS)
        parameter.requires_grad_(not is_frozen)
    model.get_input_embeddings().padding_idx = None  # the token of padding may be a part of a text, too
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
            if reference is not None:
                with torch.no_grad():
                    close_to = logits_of(reference, processor, rollout)
                loss = loss + reference_weight * reference_loss_of(logits, close_to, rollout) / n_tokens
            loss.backward()
            losses[-1] += float(loss.detach())
            see(step, rollout, scores)
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms
