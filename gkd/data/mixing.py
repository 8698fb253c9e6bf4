"""GKD's lambda: select the on-policy prompts of a batch; the others use the dataset's response.

The paper (arXiv:2306.13649, algorithm 1) draws once for a whole batch. Here each batch is a mixture: after s steps,
exactly floor(s * share * batch_size) prompts have been on-policy. An on-policy prompt contributes `rollout.n` sampled
responses, another prompt one dataset response. The selection depends only on the step number, so resuming preserves it.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

# Separates this permutation from those of `gkd.data.sampler`, which are drawn from (seed, epoch).
_STREAM = 1


def on_policy_indices(step: int, batch_size: int, share: float, seed: int) -> list[int]:
    """Return the indices in batch number `step` of the prompts that are on-policy.

    Args:
        step: number of optimizer steps before this batch.
        share: `distill.on_policy_share`, in [0, 1]; 1 selects every index, 0 none.
        seed: `data.seed`; (seed, step) determines the indices.

    Returns:
        Ascending; floor((step + 1) * share * batch_size) - floor(step * share * batch_size) of them.
    """
    # Exact decimal: in floating point, 0.29 * 100 prompts would be 28.
    each = Fraction(repr(share)) * batch_size
    count = int((step + 1) * each) - int(step * each)
    indices = np.random.default_rng([seed, step, _STREAM]).permutation(batch_size)[:count]
    return sorted(indices.tolist())
