"""GKD's lambda: which prompts of a batch the student answers, and which take the dataset's response.

The paper (arXiv:2306.13649, algorithm 1) draws once for a whole batch. Here each batch is a mixture: after
s steps exactly floor(s * share * batch_size) prompts have been on-policy, in every run. A prompt that is
on-policy is answered `rollout.n` times; one that is not contributes its dataset response once. The split
has no state but the step number, so a resumed run makes the same one.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

# Keeps this permutation apart from the epochs' of `gkd.data.sampler`, which are drawn from (seed, epoch).
_STREAM = 1


def on_policy_indices(step: int, batch_size: int, share: float, seed: int) -> list[int]:
    """Return the indices in batch number `step` of the prompts that the student generates responses for.

    Args:
        step: optimizer steps made before this batch, from 0.
        share: `distill.on_policy_share`, in [0, 1]; 1 selects every index, 0 none.
        seed: `data.seed`; (seed, step) determines the indices.

    Returns:
        Ascending; floor((step + 1) * share * batch_size) - floor(step * share * batch_size) of them.
    """
    # The decimal that was written: as a float, 0.29 of 100 prompts would be 28.
    each = Fraction(repr(share)) * batch_size
    count = int((step + 1) * each) - int(step * each)
    indices = np.random.default_rng([seed, step, _STREAM]).permutation(batch_size)[:count]
    return sorted(indices.tolist())
