"""Make tiny models of architectures that only fsdp2 supports, each with a feature that the others lack."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.dist.megatron_reference import VOCAB

# Models that read images. For text alone, transformers has a class of the second only.
GEMMA2 = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "final_logit_softcapping": 2.0}
IMAGE_KINDS = ("mistral3", "gemma3", "qwen2_5_vl")


def make_model_folder(folder: Path, kind: str, *, n_vocab: int = VOCAB, seed: int = 0) -> Path:
    """Save a model of 2 layers with random weights that all have an effect; some have `VOCAB` ids in any case."""
    import transformers as tf

    torch.manual_seed(len(kind) + seed)
    sizes = {"vocab_size": n_vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    own = {"vocab_size": VOCAB, "hidden_size": 32}  # of classes that name some sizes otherwise
    with_layers = own | {"num_hidden_layers": 2, "num_attention_heads": 4}
    two = {"num_experts_per_tok": 2}
    model: Any
    if kind in IMAGE_KINDS:
        model = tf.AutoModelForImageTextToText.from_config(_image_config(kind, sizes | ids))
    else:
        name, settings = {
            # Tied, biases, learned positions, [in, out] weights, dropout in its config.
            "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
            "olmo2": ("Olmo2", sizes | {"tie_word_embeddings": False}),
            # embed_out in the files.
            "gpt_neox": ("GPTNeoX", {k: n for k, n in sizes.items() if k != "num_key_value_heads"}),
