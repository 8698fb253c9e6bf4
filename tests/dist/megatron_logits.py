"""All logits of a Megatron student, in any layout, to compare with those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.common.step import empty_micro_batch
from gkd.actor.megatron.pipeline import _schedule
from gkd.actor.megatron.student import MegatronStudent
from gkd.types import MicroBatch
from tests.device import rank_device


@torch.no_grad()
def logits_of(student: MegatronStudent, tokens: Tensor) -> Tensor | None:
    """Return [B, S, V] float32 logits of [B, S] `tokens` on the last stage, None on the others. Collective."""
    model, batch = student.model, empty_micro_batch()
    batch.tokens = tokens.to(rank_device())

    def forward_step(batches: Iterator[MicroBatch], module: Any) -> tuple[Tensor, None]:
        step_tokens = next(batches).tokens
        columns, rows = (torch.arange(n, device=rank_device()) for n in (step_tokens.shape[1], step_tokens.numel()))
        return module(step_tokens, columns.expand_as(step_tokens), rows), None

    shapes = [tokens.shape]
    outputs = _schedule(student._ddps, model, [batch], shapes, forward_step, forward_only=True)
    if not model.layout.is_last_stage:
        return None
    shards = [torch.empty_like(outputs[0]) for _ in range(model.layout.tp)]
    dist.all_gather(shards, outputs[0].contiguous(), group=model.groups.tp)
    logits = torch.cat(shards, dim=-1)[:, : model.dims.vocab_size]
    return logits.view(*tokens.shape, -1).float()
