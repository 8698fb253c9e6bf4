"""Save tiny random models of the families in model_families.yaml, with a tokenizer of bytes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import yaml

from tests.vision_models import QWEN_TEMPLATE, save_tokenizer

VOCAB, N_BYTES = 272, 256  # rows of the embedding, and ids of bytes
_TIED = ("gemma", "granite", "cohere")  # with tied embeddings that are scaled: smaller ones, for flatter logits


@functools.cache
def families() -> dict[str, dict[str, Any]]:
    """Return name -> settings of the model's config."""
    found = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return {name: settings for name, settings in found.items() if name.islower()}


def save_family(folder: Path, name: str, *, seed: int) -> Path:
    """Save a model of a family, and return its folder.

    All parameters have random values that have an effect, also norms, biases and those of routers.
    """
    import torch
    import transformers

    settings = dict(families()[name])
    added = settings.pop("json", {})
    config = transformers.CONFIG_MAPPING[settings.pop("type", name)](**settings)
    reads_images = "text_config" in settings
    kind: Any = transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    model = kind.from_config(config, dtype=torch.float32)
    _fill(model, torch.Generator().manual_seed(seed + 1000), 0.12 if name.startswith(_TIED) else 0.5)
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | added))
    save_tokenizer(folder, QWEN_TEMPLATE)
    return folder


def _fill(model: Any, generator: Any, of_embeddings: float) -> None:
    """Replace the weights by random ones, `of_embeddings` in size for those of tokens; move vectors a little."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 or name.endswith(("A_log", "dt_bias", ".D")):
                parameter.add_(0.1 * noise)
            elif parameter.ndim == 3 and parameter.shape[1] == 1:  # a convolution of each channel
                parameter.copy_(0.4 * noise)
            elif "embed_tokens" in name and "per_layer" not in name:
                parameter.copy_(of_embeddings * noise)
            else:
                parameter.copy_(1.2 * parameter.shape[-1] ** -0.5 * noise)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name or "expert_bias" in name:
                buffer.add_(0.3 * torch.randn(buffer.shape, generator=generator))
