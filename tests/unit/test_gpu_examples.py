"""The examples for GPUs with the sizes of their models: valid settings, and a predicted peak that fits."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.memory.footprint.estimate import RankFootprint, RunModels, footprint
from gkd.memory.footprint.fit import check, needs
from tests.unit.test_footprint import GIB, QWEN25_15B, folder_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(file.parent.name for file in EXAMPLES.glob("*/config.yaml"))
CARD = round(79.1 * GIB)  # what torch reports of a card of 80 GB


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """Return the config.json of a public model, with what determines its layout and memory."""
    return {
        "model_type": "qwen3_moe" if "num_experts" in more else "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        **more,
    }


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
MODELS = {
    "Qwen2.5-1.5B-Instruct": QWEN25_15B,
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8),
    "Qwen3-8B-YaRN": _qwen3(4096, 12288, 36, 32, 8, max_position_embeddings=131072, rope_scaling=_YARN),
    "Qwen3-30B-A3B-Instruct-2507": _qwen3(
        2048, 6144, 48, 32, 4, moe_intermediate_size=768, mlp_only_layers=[], **_EXPERTS
    ),
    "Qwen3-VL-2B-Instruct": {
        "model_type": "qwen3_vl",
        "text_config": _qwen3(2048, 6144, 28, 16, 8, model_type="qwen3_vl_text", max_position_embeddings=262144),
        "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048},
        "tie_word_embeddings": True,
    },
}


def _ranks(config: Config) -> tuple[RankFootprint, ...]:
    """Return the footprints. Of a model that reads images the tensors are counted, which its files have."""
    folder = folder_of(sizes := MODELS[Path(config.model.path).name])
    if "text_config" in sizes:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**sizes))
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        text = {name: shape for name, shape in shapes.items() if ".visual." not in name}
        vision_params = sum(map(prod, shapes.values())) - sum(map(prod, text.values()))
        folder = replace(folder, tensors=text, vision_params=vision_params)
    return footprint(config, RunModels(folder), CARD)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_valid_and_leaves_a_margin(name: str) -> None:
    """Fails if an example names a key that is gone, a layout that the model cannot have, or does not fit 80 GB."""
    config = load_config(EXAMPLES / name / "config.yaml")
    check_config(config)
    sizes = MODELS[Path(config.model.path).name]
    assert config.derived.max_sequence_length <= sizes.get("text_config", sizes)["max_position_embeddings"]
    found = _ranks(config)
    assert check(found, CARD, config) == []
    assert max(need.n_bytes for need in needs(found, CARD, config) if need.limit > CARD / 2) <= 0.87 * CARD


def test_the_pages_have_the_predicted_peaks() -> None:
    """Fails if docs/sizing.md or the README of an example states another peak than the tool predicts."""
    page = (EXAMPLES.parent / "docs/sizing.md").read_text()
    for name in NAMES:
        config = load_config(EXAMPLES / name / "config.yaml")
        n_bytes = max(need.n_bytes for need in needs(_ranks(config), CARD, config) if need.who.startswith("actor"))
        share, peak = n_bytes / CARD, n_bytes / GIB
        (row,) = re.findall(rf"^\| `examples/{name}`.*$", page, re.MULTILINE)
        assert f" | {peak:.1f} | {share:.0%} | {peak / 139.8:.0%} |" in row
        assert f" {peak:.0f} GiB" in (text := (EXAMPLES / name / "README.md").read_text()) and f"{share:.0%}" in text
