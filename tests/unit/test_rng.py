"""Random generators continue after a restore."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gkd.actor.common.shards import restore_rng, rng_state
from gkd.errors import CheckpointError


def test_restored_generators_continue() -> None:
    """Fails if a restored generator of Python, numpy or torch draws different numbers, its cached Gaussian included."""

    def draw() -> list[float]:
        return [random.random(), random.gauss(), float(np.random.randn()), float(torch.randn(1))]

    before = rng_state()
    draw()  # leaves a second Gaussian of Python's and numpy's cached
    states = rng_state()
    expected = draw()
    restore_rng(states, "rng.pt")
    assert draw() == expected
    states["numpy"] = states["python"]
    with pytest.raises(CheckpointError):
        restore_rng(states, "rng.pt")
    restore_rng(before, "here")
