"""Compute the memory of a teacher server's worker, and of frozen models on actor ranks: a local teacher, a reference.

A teacher server does not report its memory. The estimate is for its model in bfloat16 on each of `tp` GPUs: weights and
the largest forward pass of one sequence at a time, whose logits exist in chunks. A frozen model is sharded over all
actor ranks, in host memory or on their GPUs, and gathered one layer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gkd.config.schema import Config
from gkd.config.schema_teacher import weight_updates
from gkd.footprint.fsdp import gathered
from gkd.footprint.rank import RankFootprint
from gkd.hf.model_dims import ModelDims, read_dims
from gkd.hf.model_folder import Tensors, count_params

_B, _FLOAT32 = 2, 4
_LOGIT_ROWS = 1024  # that the engines compute at a time
LOGITS_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}  # `teacher_server.engines.signals.CHUNK_BYTES`, without torch


def teacher_footprint(
    config_json: Mapping[str, Any], *, n_tokens: int, tp: int = 1, tensors: Tensors | None = None
) -> RankFootprint:
    """Return the footprint of rank 0 of a teacher worker.

    Args:
        n_tokens: of all sequences that it scores at a time.

    Raises:
        ModelError: as `read_dims`; or `tensors` are required and missing.
    """
    dims = read_dims(config_json)
    total = dims.n_params if dims.is_exact else count_params(tensors or {})[0]
    return RankFootprint(
        "teacher",
        0,
        {
            "weights": _B * total // tp,
            "kv_cache": n_tokens * _kv(dims) // tp,
            "activations": n_tokens * _B * (2 * dims.hidden_size + 3 * max(dims.ffn_size, dims.q_columns) // tp),
            "logits": 2 * _LOGIT_ROWS * dims.vocab_size * _FLOAT32 // tp,
        },
    )


def with_local_teacher(
    part: RankFootprint, config: Config, config_json: Mapping[str, Any], tensors: Tensors | None, *, on_cpu: bool
) -> RankFootprint:
    """Return an actor rank's footprint with its share of a local teacher. Raises ModelError as `read_dims`.

    Args:
        config_json, tensors: of teacher.path.
    """
    teacher = config.teacher
    hosted, updates = teacher.fsdp_cpu_offload, weight_updates(teacher)
    exact = updates.ema > 0.0
    part = _with_frozen(part, "teacher", config, config_json, tensors, hosted=hosted, exact=exact, on_cpu=on_cpu)
    return _with_saved_copy(part, "teacher") if updates.interval else part


def with_reference(
    part: RankFootprint, config: Config, config_json: Mapping[str, Any], tensors: Tensors | None, *, on_cpu: bool
) -> RankFootprint:
    """Return an actor rank's footprint with its share of the reference model. Raises ModelError as `read_dims`."""
    reference = config.reference
    hosted, updates = reference.fsdp_cpu_offload, weight_updates(reference)
    exact = updates.ema > 0.0
    part = _with_frozen(part, "reference", config, config_json, tensors, hosted=hosted, exact=exact, on_cpu=on_cpu)
    return _with_saved_copy(part, "reference") if updates.interval else part


def _with_saved_copy(part: RankFootprint, name: str) -> RankFootprint:
    """Return the footprint with the copy of a model that follows the student, made for a save."""
    shards = part.parts.get(f"{name}_shards", 0) + part.parts.get(f"{name}_weights", 0)
    return replace(part, parts={**part.parts, "saved_copy": part.parts["saved_copy"] + shards})


def _with_frozen(
    part: RankFootprint,
    name: str,
    config: Config,
    config_json: Mapping[str, Any],
    tensors: Tensors | None,
    *,
    hosted: bool,
    exact: bool,
    on_cpu: bool,
) -> RankFootprint:
    """Return the footprint with this rank's share of a `gkd.actor.frozen.model.FrozenModel`.

    A forward pass has two layers (the next is prefetched), the embedding or LM head, the activations of a layer, and a
    chunk of logits in the model's dtype and in float32.

    Args:
        name: "teacher" | "reference", the prefix of the parts.
        hosted: the shards are in host memory.
        exact: the shards are float32.
    """
    dims, actor = read_dims(config_json), config.actor
    total, layer, embedding = gathered(dims, tensors)
    b = _FLOAT32 if config.model.dtype == "float32" else _B
    shard_b = _FLOAT32 if exact else b  # of a parameter at home, and of the layer that is prefetched
    derived = config.derived
    longest = derived.max_teacher_length if name == "teacher" else derived.max_sequence_length
    n_tokens = max(actor.max_tokens_per_micro_batch or actor.micro_batch_size * longest, longest)
    shards = -(-total * shard_b // derived.world_size)
    home = f"{name}_shards" if hosted and not on_cpu else f"{name}_weights"
    chunk = LOGITS_BYTES["cpu" if on_cpu else "cuda"]
    widths = 2 * dims.hidden_size + 3 * max(dims.ffn_size, dims.q_columns)
    working = layer * (b + shard_b) + embedding * b + n_tokens * b * widths
    return replace(part, parts={**part.parts, home: shards, f"{name}_pass": working + chunk + chunk * b // _FLOAT32})


def _kv(dims: ModelDims) -> int:
    return 2 * dims.n_layers * dims.kv_columns * _B
