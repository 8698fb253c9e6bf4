"""The examples for GPUs, with model folders of the real sizes whose weights are holes in their files."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.memory.footprint.fit import check, needs
from gkd.preflight.student import check_student
from tests.unit.chat_templates import tokenizer
from tests.unit.test_footprint import GIB, QWEN25_15B, ranks_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(file.parent.name for file in EXAMPLES.glob("*/config.yaml"))
FEWER = {"num_hidden_layers": 8, "vocab_size": 1024}
CARD = round(79.1 * GIB)  # what torch reports of a card of 80 GB


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """Return the config.json of a public model, with what determines its layout and memory."""
    return {
        "architectures": ["Qwen3MoeForCausalLM" if "num_experts" in more else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if "num_experts" in more else "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
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
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8),
    "Qwen3-30B-A3B-Instruct-2507": _qwen3(
        2048, 6144, 48, 32, 4, moe_intermediate_size=768, mlp_only_layers=[], **_EXPERTS
    ),
}


def write_sparse(file: Path, shapes: dict[str, list[int]]) -> None:
    """Write a safetensors file of bfloat16 zeros that take no space on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)


def stand_in(folder: Path, config: dict[str, Any]) -> Path:
    """Write a folder as the hub has it for this config.json: sparse weight files, an index and a tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    hidden, width = (
        config["hidden_size"],
        config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
    )
    heads, kv_heads = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [config["vocab_size"], hidden]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")}
        rows = {"q": heads, "k": kv_heads, "v": kv_heads}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": [n, hidden] for name, n in rows.items()}
        shapes[f"{layer}.self_attn.o_proj.weight"] = [hidden, heads]
        if config["model_type"].startswith("qwen3"):
            shapes |= {f"{layer}.self_attn.{name}_norm.weight": [width] for name in "qk"}
        else:
            shapes |= {f"{layer}.self_attn.{name}_proj.bias": [n] for name, n in rows.items()}
        mlps, inner = [f"{layer}.mlp"], config["intermediate_size"]
        if n_experts := config.get("num_experts"):
            mlps, inner = [f"{layer}.mlp.experts.{e}" for e in range(n_experts)], config["moe_intermediate_size"]
            shapes[f"{layer}.mlp.gate.weight"] = [n_experts, hidden]
        for mlp in mlps:
            shapes |= {f"{mlp}.{name}_proj.weight": [inner, hidden] for name in ("gate", "up")}
            shapes[f"{mlp}.down_proj.weight"] = [hidden, inner]
    weight_map, by_file = {}, dict[str, dict[str, list[int]]]()
    for name, shape in shapes.items():
        layer = name.split(".")[2] if ".layers." in name else "others"
        by_file.setdefault(f"model-{layer}.safetensors", {})[name] = shape
    for file, own in by_file.items():
        write_sparse(folder / file, own)
        weight_map |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of a model to its stand-in, which has fewer layers and words."""
    return functools.cache(lambda name: stand_in(tmp_path_factory.mktemp("models") / name, MODELS[name] | FEWER))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_passes_preflight_and_leaves_a_margin(name: str, folder_of: Callable[[str], Path]) -> None:
    """Fails if an example names a key that is gone, a layout that the model cannot have, or does not fit 80 GB."""
    config = load_config(EXAMPLES / name / "config.yaml")
    check_config(config)
    sizes = MODELS[Path(config.model.path).name]
    overrides = [f"model.path={folder_of(Path(config.model.path).name)}"]
    if config.teacher.path:
        overrides.append(f"teacher.path={folder_of(Path(config.teacher.path).name)}")
    config = load_config(EXAMPLES / name / "config.yaml", overrides)
    assert check_student(config) == FEWER["vocab_size"]
    found = ranks_of(config, sizes, gpu_bytes=CARD)
    assert check(found, CARD, config) == []
    assert max(need.n_bytes for need in needs(found, CARD, config) if need.limit > CARD / 2) <= 0.87 * CARD


def test_the_pages_have_the_predicted_peaks() -> None:
    """Fails if docs/sizing.md or the README of an example states another peak than the tool predicts."""
    page = (EXAMPLES.parent / "docs/sizing.md").read_text()
    for name in NAMES:
        config = load_config(EXAMPLES / name / "config.yaml")
        found = ranks_of(config, MODELS[Path(config.model.path).name], gpu_bytes=CARD)
        n_bytes = max(need.n_bytes for need in needs(found, CARD, config) if need.who.startswith("actor"))
        share, peak = n_bytes / CARD, n_bytes / GIB
        (row,) = re.findall(rf"^\| `examples/{name}`.*$", page, re.MULTILINE)
        assert f" | {peak:.1f} | {share:.0%} | {peak / 139.8:.0%} |" in row
        assert f" {peak:.0f} GiB" in (text := (EXAMPLES / name / "README.md").read_text()) and f"{share:.0%}" in text
