"""The ways of moving a model that `tests/bench/bench_memory.py` compares: each moves its own storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Qwen3Config

from tests.bench.memory_case import Case, built, forward, local_weights, switch

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("how", ["manual", "states"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_leaves_and_returns(tmp_path: Path, how: str, tied: bool) -> None:
    """Fails if a way moves a view and the model stays, so that its peak doubles and its outputs are trivially equal."""
    Qwen3Config(**SIZES, tie_word_embeddings=tied).save_pretrained(tmp_path)
    case, device = Case(how, "cpu", SIZES, "bfloat16", 1, moments=True, seq_len=4), torch.device("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, moments = built(case, device, tmp_path)
        tokens = torch.arange(4)[None]
        first = forward(case, model, tokens)
        for _ in range(2):
            held = [*local_weights(model), *moments]
            there = [StorageWeakRef(t.untyped_storage()) for t in held]
            n_bytes = sum(t.numel() * t.itemsize for t in held)
            del held
            come, go = switch(case, device, model, moments)
            on_device = [t.untyped_storage().nbytes() for t in [*local_weights(model), *moments]]
            if how == "manual":  # the storages are released, not only left by the tensors
                assert all(storage.expired() for storage in there)
            else:
                assert sum(on_device) == 0 < n_bytes
            come()
            assert torch.equal(forward(case, model, tokens), first)
        go()
        come()
        local_weights(model)[-1].zero_()  # of the LM head: what has come back is what computes
        assert not forward(case, model, tokens).any()
    finally:
        dist.destroy_process_group()
