"""Make tiny models of architectures that only fsdp2 supports, each with a feature that the others lack."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.dist.megatron_reference import VOCAB

# Models that read images. For text alone, transformers has a class of the second only.
IMAGE_KINDS = ("mistral3", "gemma3", "qwen2_5_vl")


def make_model_folder(folder: Path, kind: str, *, n_vocab: int = VOCAB, seed: int = 0) -> Path:
    """Save a model of 2 layers with random weights that all have an effect; some have `VOCAB` ids in any case."""
    import transformers as tf

    torch.manual_seed(len(kind) + seed)
    sizes = {"vocab_size": n_vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model: Any
    if kind in IMAGE_KINDS:
        model = tf.AutoModelForImageTextToText.from_config(_image_config(kind, sizes | ids))
    elif kind == "gpt2":  # tied, biases, learned positions, [in, out] weights, dropout in its config
        model = tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, **ids)
        )
    elif kind == "olmo2":
        model = tf.Olmo2ForCausalLM(tf.Olmo2Config(**sizes, **ids, tie_word_embeddings=False))
    elif kind == "gpt_neox":  # embed_out in the files
        del sizes["num_key_value_heads"]
        model = tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**sizes, **ids))
    elif kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        model = tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**sizes, **ids, **experts, head_dim=8))
    elif kind == "gpt_oss":  # windows, sinks, experts with biases in one tensor
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
        model = tf.GptOssForCausalLM(tf.GptOssConfig(**sizes, **ids, **experts, head_dim=8))
    elif kind == "mixtral":  # other names; a number of experts that two ranks do not divide
        model = tf.MixtralForCausalLM(tf.MixtralConfig(**sizes, **ids, num_local_experts=3, num_experts_per_tok=2))
    elif kind == "opt":  # layers in a decoder within the backbone
        settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32}
        model = tf.OPTForCausalLM(
            tf.OPTConfig(vocab_size=VOCAB, ffn_dim=48, max_position_embeddings=64, **settings, **ids)
        )
    elif kind == "falcon":  # its own attention code
        settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = tf.FalconForCausalLM(tf.FalconConfig(vocab_size=VOCAB, **settings, **ids))
    elif kind == "mamba":  # no attention at all
        model = tf.MambaForCausalLM(tf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, **ids))
    else:  # gemma2: sliding windows, soft caps on scores and logits, scaled embeddings
        capped = {"final_logit_softcapping": 2.0}
        config = tf.Gemma2Config(**sizes, **ids, head_dim=8, query_pre_attn_scalar=8, sliding_window=4, **capped)
        model = tf.Gemma2ForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(1.0 if param.ndim == 1 else 0.0, 0.15)
    model.save_pretrained(folder)
    return folder


def language_model(names: Iterable[str]) -> set[str]:
    """Return which tensors of one of `IMAGE_KINDS` a student trains."""
    return {name for name in names if not name.startswith(("vision_tower.", "multi_modal_projector.", "visual."))}


def _image_config(kind: str, sizes: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    sizes |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    text: dict[str, Any] = {
        "mistral3": {"model_type": "mistral", "sliding_window": None},
        "gemma3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "qwen2_5_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}},
    }
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower |= {"head_dim": 16, "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    shared = {"tie_word_embeddings": kind != "mistral3", "image_token_id": 4, "mm_tokens_per_image": 4}
    return CONFIG_MAPPING[kind](text_config=sizes | text[kind] | shared, vision_config=tower, **shared)
