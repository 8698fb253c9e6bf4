"""Save folders of small random models, and make their tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_random(folder: Path, kind: str = "Qwen3", *, seed: int = 0, **settings: Any) -> Path:
    """Save a float32 model of transformers, and return its folder.

    Args:
        kind: `Qwen3` stands for Qwen3Config and Qwen3ForCausalLM.
        settings: of the config; those that are not given are sizes of a tiny model.
    """
    import torch
    import transformers

    tiny: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**(tiny | settings))
    getattr(transformers, f"{kind}ForCausalLM")(config).float().save_pretrained(folder)
    return folder


def word_tokenizer(n_words: int, **special: str) -> Any:
    """Return a tokenizer of the words w0, w1, ...; w0 stands for all others."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(n_words)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)
