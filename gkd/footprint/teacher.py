"""The memory of one teacher worker, from the config.json of its model.

A teacher server says nothing of its memory. This is what its model takes in bfloat16 on each of `tp` cards: weights,
and the largest forward pass of one sequence at a time, whose logits exist in chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gkd.footprint.shapes import ModelShape, Tensors, count, read_shape
from gkd.footprint.types import RankFootprint

_B, _FLOAT32 = 2, 4
_LOGIT_ROWS = 1024  # that the engines compute at once


def teacher_footprint(
    config_json: Mapping[str, Any], *, n_tokens: int, tp: int = 1, tensors: Tensors | None = None
) -> RankFootprint:
    """Rank 0 of a worker.

    Args:
        n_tokens: of the sequences that it scores together.

    Raises:
        ModelError: as `read_shape`, or a model whose tensors are needed.
    """
    shape = read_shape(config_json)
    total = shape.n_params if shape.is_exact() else count(tensors or {})[0]
    return RankFootprint(
        "teacher",
        0,
        {
            "weights": _B * total // tp,
            "kv_cache": n_tokens * _kv(shape) // tp,
            "activations": n_tokens * _B * (2 * shape.hidden + 3 * max(shape.ffn, shape.q_columns) // tp),
            "logits": 2 * _LOGIT_ROWS * shape.vocab_size * _FLOAT32 // tp,
        },
    )


def _kv(shape: ModelShape) -> int:
    return 2 * shape.n_layers * shape.kv_columns * _B
