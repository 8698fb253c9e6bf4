"""Models and prompts of `bench_trl`: random weights, a vocabulary of 32 tokens, the same files for both programs.

The head's weights are so small that every token has a probability of nearly 1/32, also the end-of-sequence token.
Response lengths are therefore geometric with mean 32 on both sides, and cut at the shape's limit. The learning rate is
so small that this does not change.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCAB, N_PROMPT = 32, 8
PAD, EOS = 0, 1
LEARNING_RATE = 1e-6
_HEAD_SCALE = 0.02  # of the usual initialization
_HEAD_DIM = 32  # the smallest that vLLM's CPU attention supports


@dataclass(frozen=True, slots=True)
class Shape:
    """One workload: (hidden size, layers) of both models, most tokens of a response, and sequences of a step."""

    student: tuple[int, int]
    teacher: tuple[int, int]
    max_response: int
    batch: int
    steps: int  # measured ones of this system; one for each scheduler
    trl_steps: int
    goal: float  # ratio to TRL


SHAPES = {
    "long_tail": Shape((256, 4), (384, 6), 256, 64, steps=10, trl_steps=4, goal=3.0),
    "short": Shape((64, 2), (128, 3), 24, 256, steps=30, trl_steps=20, goal=0.7),
}


def make_files(shape: Shape, folder: Path, n_prompts: int) -> None:
    """Write student, teacher and `prompts.jsonl` into `folder`."""
    _save_model(folder / "student", *shape.student, seed=1)
    _save_model(folder / "teacher", *shape.teacher, seed=2)
    rng = np.random.default_rng(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(n_prompts):
            prompt = " ".join(f"t{token}" for token in rng.integers(2, VOCAB, N_PROMPT))
            file.write(json.dumps({"prompt": prompt}) + "\n")


def _save_model(folder: Path, hidden_size: int, n_layers: int, seed: int) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    n_heads = hidden_size // _HEAD_DIM
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=n_layers,
            num_attention_heads=n_heads,
            num_key_value_heads=max(1, n_heads // 2),
            head_dim=_HEAD_DIM,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
            dtype="float32",
        )
    )
    with torch.no_grad():
        model.lm_head.weight *= _HEAD_SCALE
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    words = {"<pad>": PAD, "<eos>": EOS} | {f"t{token}": token for token in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    ).save_pretrained(folder)
