"""Save folders of small random models that read images, with tokenizer, chat template and image processor."""

from __future__ import annotations

import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tests.device import on_cuda

# The forms of templates: Qwen's writes an image where it stands, LLaVA's puts all in front and reads parts alone.
QWEN_TEMPLATE = (
    "{% set count = namespace(value=0) %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
    "{% set count.value = count.value + 1 %}{% if add_vision_id %}Picture {{ count.value }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INTERN_TEMPLATE = QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>\n")
GEMMA_TEMPLATE = QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>")
GEMMA_TEMPLATE = GEMMA_TEMPLATE.replace("{{ p.text }}", "{{ p.text | trim }}")  # as that of the hub
LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ m.role.upper() + ': ' }}"
    "{% for p in m.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<|video_pad|>", "<image>"),
)
# What InternVL's processor calls four of them; the hub's have other texts.
_NAMES = ("start_image_token", "end_image_token", "context_image_token", "video_token")
# What Gemma 3's calls three of them.
_MARKS = {"boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>", "image_token": "<|image_pad|>"}
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
_INTERLEAVED = _MROPE | {"mrope_interleaved": True}
_GRID = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_LAYERED = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 14,
}
_LAYERS = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2}
_PARTIAL = _INTERLEAVED | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
_STATE = {"linear_num_key_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
# Model type -> settings of the text, of the vision tower.
_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": ({"model_type": "llama"}, _LAYERED | {"model_type": "clip_vision_model", "projection_dim": 64}),
    "internvl": ({"model_type": "qwen3"}, _LAYERED | {"attention_bias": True}),
    "gemma3": (
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32},
        _LAYERED | {"model_type": "siglip_vision_model", "vision_use_head": False},
    ),
    "qwen2_5_vl": ({"rope_parameters": _MROPE}, _GRID | {"fullatt_block_indexes": [1]}),
    "qwen3_vl": (
        {"rope_parameters": _INTERLEAVED},
        _GRID | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": (_LAYERS | _STATE | {"rope_parameters": _PARTIAL}, _GRID | {"num_position_embeddings": 16}),
}


def missing(kind: str) -> str:
    """Return why vLLM does not compute images of a model here; empty: it does."""
    if kind != "llava" and find_spec("torchvision") is None:
        return "needs torchvision"
    return "vLLM attends causally over images on a CPU" if kind == "gemma3" and not on_cuda() else ""


def save_vision_model(folder: Path, kind: str = "llava", *, seed: int = 0, image_size: int = 56, **sizes: int) -> Path:
    """Save a float32 model with the tensor names of the hub, and return its folder.

    Args:
        image_size: pixels a side that LLaVA and Gemma 3 read, or of a tile of InternVL.
        sizes: of the language model.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    template = {"llava": LLAVA_TEMPLATE, "internvl": INTERN_TEMPLATE, "gemma3": GEMMA_TEMPLATE}.get(kind, QWEN_TEMPLATE)
    tokenizer = save_tokenizer(folder, template, merges_lines=kind == "gemma3")
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    text, vision = _SETTINGS[kind]
    if kind in ("llava", "internvl", "gemma3"):
        vision = vision | {"image_size": image_size}
    image_token = ids["<image>" if kind == "llava" else "<|image_pad|>"]
    named = {"image_token_id": image_token, "video_token_id": ids["<|video_pad|>"]}
    named |= {"vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"]}
    own = {"llava": {"image_token_index": image_token}, "internvl": {"image_token_id": image_token}}
    own["gemma3"] = {"image_token_index": image_token, "mm_tokens_per_image": (image_size // 28) ** 2}
    own["gemma3"] |= {"boi_token_index": ids["<|vision_start|>"], "eoi_token_index": ids["<|vision_end|>"]}
    config = CONFIG_MAPPING[kind](
        text_config=_TEXT | {"vocab_size": len(tokenizer)} | text | sizes,
        vision_config=vision,
        **own.get(kind, named),
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * noise) if parameter.ndim < 2 else parameter.copy_(noise * parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "pad_token_id": ids[SPECIAL[0]]}))
    processor: dict[str, Any]
    if kind in ("llava", "gemma3"):
        rename_tower(folder)
    if kind == "llava":
        processor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": image_size}}
        processor |= {"crop_size": {"height": image_size, "width": image_size}}
    elif kind == "internvl":
        processor = {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": False, "max_patches": 4}
        processor |= {"size": {"height": image_size, "width": image_size}}
    elif kind == "gemma3":
        processor = {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": image_size, "width": image_size},
        }
    else:
        processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
        processor |= {"temporal_patch_size": 2, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 64}
    video = {"video_processor_type": f"{'InternVL' if kind == 'internvl' else 'Qwen2VL'}VideoProcessor"}
    if kind not in ("llava", "gemma3"):
        (folder / "video_preprocessor_config.json").write_text(json.dumps(processor | video))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    kinds = {"llava": "LlavaProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "internvl": "InternVLProcessor"}
    kinds["gemma3"] = "Gemma3Processor"
    settings: dict[str, Any] = {"processor_class": kinds.get(kind, "Qwen3VLProcessor")}
    if kind == "llava":
        settings |= {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    if kind in ("internvl", "gemma3"):
        settings |= {"image_seq_length": (image_size // 28) ** 2}  # of a tile
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def rename_tower(folder: Path) -> None:
    """Give a tower the names of the hub: transformers 5 writes others, which vLLM does not read."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    old, new = "vision_tower.", "vision_tower.vision_model."
    named = {name.replace(old, new) if new not in name else name: tensor for name, tensor in tensors.items()}
    save_file(named, file, {"format": "pt"})


def save_tokenizer(folder: Path, template: str, *, merges_lines: bool = False) -> Any:
    """Save a tokenizer of bytes, and return it.

    Args:
        merges_lines: up to four line feeds are one token and are not cut off, as in Gemma's.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if merges_lines:
        letters = [chr(10), *map(chr, range(32, 287)), *("\n" * n for n in (2, 3, 4))]
    merges = [("\n" * n, "\n" * m) for n, m in ((1, 1), (2, 2), (2, 1))] if merges_lines else []
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges))
    if not merges_lines:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        extra_special_tokens=_MARKS if merges_lines else dict(zip(_NAMES, SPECIAL[3:7], strict=True)),
    )
    fast.save_pretrained(folder)
    return fast


def picture(height: int, width: int, seed: int = 0, form: str = "PNG") -> bytes:
    """Return an encoded image of colored noise in blocks."""
    from PIL import Image

    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)[:height, :width]).save(file, form)
    return file.getvalue()
