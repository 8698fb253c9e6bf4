"""The memory of a teacher, from the config.json of its model: of a server's worker, or of a local one on actor ranks,
as which a reference counts.

A teacher server says nothing of its memory. This is what its model takes in bfloat16 on each of `tp` cards: weights,
and the largest forward pass of one sequence at a time, whose logits exist in chunks. A local teacher is spread over all
actor ranks, in host memory or on their cards, and gathered there a layer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.footprint.fsdp import gathered
from gkd.footprint.types import RankFootprint
from gkd.hf.model_dims import ModelDims, read_dims
from gkd.hf.model_folder import Tensors, count_params

_B, _FLOAT32 = 2, 4
_LOGIT_ROWS = 1024  # that the engines compute at once
LOGITS_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}  # `teacher_server.engines.signals.CHUNK_BYTES`, without torch


def teacher_footprint(
    config_json: Mapping[str, Any], *, n_tokens: int, tp: int = 1, tensors: Tensors | None = None
) -> RankFootprint:
    """Rank 0 of a worker.

    Args:
        n_tokens: of the sequences that it scores together.

    Raises:
        ModelError: as `read_dims`, or a model whose tensors are needed.
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
    """An actor rank with its share of a local teacher. Raises ModelError as `read_dims`.

    Args:
        config_json, tensors: of teacher.path.
    """
    teacher = config.teacher
    hosted, exact = teacher.fsdp_cpu_offload, teacher.update_ema > 0.0
    part = _with_frozen(part, "teacher", config, config_json, tensors, hosted=hosted, exact=exact, on_cpu=on_cpu)
    if not teacher.update_interval:
        return part
    shards = part.parts.get("teacher_shards", 0) + part.parts.get("teacher_weights", 0)
    return replace(part, parts={**part.parts, "saved_copy": part.parts["saved_copy"] + shards})


def with_reference(
    part: RankFootprint, config: Config, config_json: Mapping[str, Any], tensors: Tensors | None, *, on_cpu: bool
) -> RankFootprint:
    """The same of `reference_folder`'s model."""
    hosted = config.reference.fsdp_cpu_offload
    return _with_frozen(part, "reference", config, config_json, tensors, hosted=hosted, exact=False, on_cpu=on_cpu)


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
    """With its share of a `gkd.actor.frozen.model.FrozenModel`.

    Its pass is a layer and the next one, the embedding, which may be the LM head, the activations of a layer, and a
    chunk of logits as the LM head makes them and in float32.

    Args:
        hosted: its shards are in host memory.
        exact: they are float32.
    """
    dims, actor = read_dims(config_json), config.actor
    total, layer, embedding = gathered(dims, tensors)
    b = _FLOAT32 if config.model.dtype == "float32" else _B
    derived = derive(config)
    n_tokens = actor.max_tokens_per_micro_batch or actor.micro_batch_size * derived.max_sequence_length
    shards = -(-total * (_FLOAT32 if exact else b) // derived.world_size)
    home = f"{name}_shards" if hosted and not on_cpu else f"{name}_weights"
    chunk = LOGITS_BYTES["cpu" if on_cpu else "cuda"]
    working = (2 * layer + embedding) * b + n_tokens * b * (
        2 * dims.hidden_size + 3 * max(dims.ffn_size, dims.q_columns)
    )
    return replace(part, parts={**part.parts, home: shards, f"{name}_pass": working + chunk + chunk * b // _FLOAT32})


def _kv(dims: ModelDims) -> int:
    return 2 * dims.n_layers * dims.kv_columns * _B
