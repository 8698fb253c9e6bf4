"""Compute the memory of a teacher server's worker, and of frozen models on actor ranks: a local teacher, a reference.

A teacher server does not report its memory. The estimate is for its model in bfloat16 on one GPU: weights and
the largest forward pass of one sequence at a time, whose logits exist in chunks. A frozen model is sharded over all
actor ranks, in host memory or on their GPUs, and gathered one layer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from gkd.config.schema import Config
from gkd.config.schema_teacher import weight_updates
from gkd.hf.model_dims import read_dims
from gkd.hf.model_folder import Tensors
from gkd.memory.footprint.fsdp import gathered
from gkd.memory.footprint.rank import RankFootprint

_B, _FLOAT32 = 2, 4
_LOGIT_ROWS = 1024  # rows that the engines compute at a time
LOGITS_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}  # `teacher_server.engines.signals.CHUNK_BYTES`, without torch


def teacher_footprint(
    config_json: Mapping[str, Any], *, n_tokens: int, tensors: Tensors | None = None
) -> RankFootprint:
    """Return the footprint of rank 0 of a teacher worker.

    Args:
        n_tokens: of all sequences that it scores at a time.

    Raises:
        ModelError: as `read_dims`; or `tensors` are required and missing.
    """
    dims = read_dims(config_json)
    total, _, _ = gathered(dims, tensors)
    return RankFootprint(
        "teacher",
        0,
        {
            "weights": _B * total,
            "kv_cache": n_tokens * 2 * dims.n_layers * dims.kv_columns * _B,
            "activations": n_tokens * _B * (2 * dims.hidden_size + 3 * max(dims.ffn_size, dims.q_columns)),
            "logits": 2 * _LOGIT_ROWS * dims.vocab_size * _FLOAT32,
        },
    )


def with_frozen(
    part: RankFootprint,
    name: Literal["teacher", "reference"],
    config: Config,
    config_json: Mapping[str, Any],
    tensors: Tensors | None,
    *,
    on_cpu: bool,
) -> RankFootprint:
    """Return an actor rank's footprint with its share of a frozen model. Raises ModelError as `read_dims`.

    A forward pass has two layers (the next is prefetched), the embedding or LM head, the activations of a layer, and a
    chunk of logits in the model's dtype and in float32. A model that follows the student is copied for a save.

    Args:
        name: the section of the model's settings, and the prefix of the parts.
        config_json, tensors: of the model.
    """
    settings = config.teacher if name == "teacher" else config.reference
    dims, actor, updates = read_dims(config_json), config.actor, weight_updates(settings)
    total, layer, embedding = gathered(dims, tensors)
    b = _FLOAT32 if config.model.dtype == "float32" else _B
    shard_b = _FLOAT32 if updates.ema > 0.0 else b  # bytes of a parameter at home, and in the layer that is prefetched
    derived = config.derived
    longest = derived.max_teacher_length if name == "teacher" else derived.max_sequence_length
    n_tokens = max(actor.max_tokens_per_micro_batch or actor.micro_batch_size * longest, longest)
    shards = -(-total * shard_b // derived.world_size)
    home = f"{name}_shards" if settings.fsdp_cpu_offload and not on_cpu else f"{name}_weights"
    chunk = LOGITS_BYTES["cpu" if on_cpu else "cuda"]
    widths = 2 * dims.hidden_size + 3 * max(dims.ffn_size, dims.q_columns)
    working = layer * (b + shard_b) + embedding * b + n_tokens * b * widths
    parts = {**part.parts, home: shards, f"{name}_pass": working + chunk + chunk * b // _FLOAT32}
    if updates.interval:
        parts["saved_copy"] += shards
    return replace(part, parts=parts)
