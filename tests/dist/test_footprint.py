"""Compare a real Megatron rank's memory with the prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.footprint_case import SIZES, Case, measure

pytestmark = [
    pytest.mark.dist,
    pytest.mark.cpu_only("memory of the host; tests.bench.bench_footprint measures a GPU's"),
]

# 21 million parameters and 1024 tokens at once: about as much memory for activations as for the state.
SMALLER = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
TOKENS = ("data.max_prompt_length=64", "data.max_response_length=192", "actor.micro_batch_size=4")


def test_memory_grows_as_predicted(tmp_path: Path) -> None:
    """Fails if a real rank takes 15% more or less memory than the table predicts, after building and during a training
    step: then a tensor of the size of the model, or the activations of half a layer, was added or removed.
    """
    sizes = SIZES | SMALLER | {"num_attention_heads": 8}
    (found,) = measure(Case("activations", TOKENS, sizes), tmp_path, timeout_s=300.0)
    parts = found.predicted.parts
    assert parts["weights"] > 4 * 20e6
    assert parts["activations"] > 0.4 * found.predicted.total_bytes, parts
    assert 0.85 < found.state_ratio < 1.15, found
    assert 0.85 < found.peak_ratio < 1.15, found
