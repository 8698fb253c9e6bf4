"""The well-known numbers: a model's weights, gradients and Adam moments on one card, nothing sharded.

    all bfloat16           2 + 2 + 4 bytes a parameter: what is usually quoted. Small updates round away.
    this project           bfloat16 weights, float32 gradients, masters and moments: 2 + 4 + 4 + 8
    this project, float32  the weights are their own masters: 4 + 4 + 8

For Qwen2.5-1.5B (1.54e9 parameters, the embedding shared) the first is 3.1 + 3.1 + 6.2 = 12.3 GB, in units of 1e9
bytes, without activations. An engine that samples from it takes 3.1 GB of weights and the KV cache of its sequences,
28,672 bytes a token: 5 to 6 GB in all with 67,000 to 101,000 tokens, which are 44 to 66 sequences of 1536.
"""

from __future__ import annotations

from gkd.hf.model_dims import ModelDims

# Bytes a parameter.
PRECISIONS: dict[str, dict[str, int]] = {
    "all bfloat16": {"weights": 2, "gradients": 2, "masters": 0, "moments": 4},
    "this project, bfloat16": {"weights": 2, "gradients": 4, "masters": 4, "moments": 8},
    "this project, float32": {"weights": 4, "gradients": 4, "masters": 0, "moments": 8},
}


def reference(dims: ModelDims) -> dict[str, dict[str, int]]:
    """Bytes by part of a whole model, in each of `PRECISIONS`; for architectures that `dims.is_exact`."""
    return {name: {part: size * dims.n_params for part, size in parts.items()} for name, parts in PRECISIONS.items()}
