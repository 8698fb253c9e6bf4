"""The examples for GPUs, with model folders of the real sizes whose weights are holes in their files."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.data.prompts import RowReader, load_prompts
from gkd.memory.footprint import check, footprint
from gkd.memory.footprint.limits import smallest_margin
from gkd.preflight.student import check_student
from tests.unit.chat_templates import tokenizer
from tests.unit.model_sizes import MODELS
from tests.unit.test_footprint import GIB

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(file.parent.name for file in EXAMPLES.glob("*/config.yaml"))
CARD = round(79.1 * GIB)  # what torch reports of a card of 80 GB


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
    """Return a function from the name of a model to its stand-in."""
    return functools.cache(lambda name: stand_in(tmp_path_factory.mktemp("models") / name, MODELS[name]))


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
    assert check_student(config) == sizes["vocab_size"]
    found = footprint(config, sizes)
    assert check(found, CARD, config) == [] and smallest_margin(found, CARD, config)[1] >= 0.15


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_its_page(name: str) -> None:
    """Fails if an example has no page with its commands, or one that does not say that no GPU has run it."""
    page = (EXAMPLES / name / "README.md").read_text()
    assert f"launch/train.sh --config examples/{name}/config.yaml" in page
    assert ("launch/teacher.sh" in page) == (name != "lora_one_gpu")  # its teacher is in the actor's process
    assert "Not run on a GPU yet" in page


@pytest.mark.parametrize(
    "name", [name for name in NAMES if "enable_thinking" in (EXAMPLES / name / "config.yaml").read_text()]
)
def test_thinking_is_off_in_every_prompt(name: str, tmp_path: Path) -> None:
    """Fails if the examples' switch does not reach the student's and the teacher's prompts."""
    config = load_config(EXAMPLES / name / "config.yaml")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "What is tea?"}) + "\n")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    )
    reader = tokenizer(template)
    (prompt,), _ = load_prompts([str(file)], "data.train_files", RowReader(config.data, reader, teacher=config.teacher))
    assert (prompt.teacher_ids is not None) == bool(config.teacher.prompt_template)
    for ids in (prompt.token_ids, prompt.token_ids if prompt.teacher_ids is None else prompt.teacher_ids):
        assert reader.decode(list(ids)).endswith("<think>\n\n</think>\n\n")
