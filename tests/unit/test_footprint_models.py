"""What is read of a model's folder: sizes that are left out, sizes that are none, and the files that count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gkd.errors import ModelError
from gkd.footprint.folder import tensor_shapes
from gkd.footprint.shapes import EXACT, read_shape
from tests.unit.test_footprint import QWEN25_15B

# What no architecture is without; the rest may be left to its defaults.
NEEDED = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 32}
MOE = {**NEEDED, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("kind", EXACT)
def test_sizes_that_are_left_out(kind: str) -> None:
    """Fails if what config.json leaves out is not what the architecture has then: heads, MLPs, experts, the window."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **NEEDED)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_shape({"model_type": kind, **NEEDED})
    assert shape.n_params == sum(param.numel() for param in model.parameters())
    assert shape.n_kv_heads == config.num_key_value_heads
    assert (0 if shape.experts is None else shape.experts.n_active) == getattr(config, "num_experts_per_tok", 0)
    assert shape.sliding_window == (config.sliding_window if kind == "mistral" else None)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_key_value_heads": "two"}, "num_key_value_heads"),
        ({"num_key_value_heads": -2}, "num_key_value_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"num_key_value_heads": 24}, "num_key_value_heads"),
        ({"head_dim": [128]}, "head_dim"),
        ({"head_dim": -128}, "head_dim"),
        ({"intermediate_size": "8960"}, "intermediate_size"),
        ({"intermediate_size": -1}, "intermediate_size"),
        ({"intermediate_size": True}, "intermediate_size"),
        ({"hidden_size": 10**30}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": float("nan")}, "vocab_size"),
        ({**MOE, "num_experts": -4}, "num_experts"),
        ({**MOE, "num_experts": {}}, "num_experts"),
        ({**MOE, "num_experts_per_tok": 9}, "9 of them active"),
        ({**MOE, "moe_intermediate_size": "64"}, "moe_intermediate_size"),
        ({**MOE, "decoder_sparse_step": "one"}, "decoder_sparse_step"),
        ({**MOE, "mlp_only_layers": 3}, "mlp_only_layers"),
        ({**MOE, "mlp_only_layers": [[]]}, "mlp_only_layers"),
    ],
)
def test_sizes_that_are_none(change: dict[str, Any], word: str) -> None:
    """Fails if a wrong type in config.json is a traceback, or an absurd size an estimate."""
    with pytest.raises(ModelError, match=word):
        read_shape({**QWEN25_15B, **change})


def _save(path: Path, **tensors: int) -> None:
    from safetensors.torch import save_file

    save_file({name: torch.zeros(size) for name, size in tensors.items()}, path)


def test_only_files_that_are_loaded_count(tmp_path: Path) -> None:
    """Fails if an adapter's or an older copy's file beside the weights is counted as a part of the model."""
    _save(tmp_path / "model.safetensors", a=3)
    _save(tmp_path / "adapter_model.safetensors", b=5)
    assert tensor_shapes(tmp_path) == {"a": (3,)}
    _save(tmp_path / "model-00001-of-00002.safetensors", c=7)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"c": "model-00001-of-00002.safetensors"}}))
    assert tensor_shapes(tmp_path) == {"c": (7,)}
    index.write_text(json.dumps({"weight_map": {"c": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match=r"not in the folder: model-00002-of-00002\.safetensors"):
        tensor_shapes(tmp_path)
    index.write_text("[]")
    with pytest.raises(ModelError, match="not a safetensors index"):
        tensor_shapes(tmp_path)
