"""Models and prompts of `bench_trl`, the same files for both programs: random weights and 32 tokens, or a real pair.

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
    dtype: str = "float32"
    is_real: bool = False  # 12 of SmolLM2-135M-Instruct's 30 layers as the student, all of them as the teacher

    @property
    def max_prompt(self) -> int:
        return 64 if self.is_real else N_PROMPT

    @property
    def topk(self) -> int:
        """Return the length of our teacher's list; TRL's loss has the whole vocabulary."""
        return 64 if self.is_real else VOCAB


SHAPES = {
    "long_tail": Shape((256, 4), (384, 6), 256, 64, steps=10, trl_steps=4, goal=3.0),
    "short": Shape((64, 2), (128, 3), 24, 256, steps=30, trl_steps=20, goal=0.7),
    "real": Shape((576, 12), (576, 30), 64, 16, steps=4, trl_steps=3, goal=2.0, is_real=True),
    "real_bfloat16": Shape((576, 12), (576, 30), 64, 16, 4, 3, goal=2.0, dtype="bfloat16", is_real=True),
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


def link_files(real: Path, folder: Path, n_prompts: int) -> None:
    """Link student and teacher of examples/real_model, and write its prompts with the text that TRL tokenizes."""
    from transformers import AutoTokenizer

    folder.mkdir(exist_ok=True)
    for role, name in (("student", "12_layers"), ("teacher", "whole")):
        (folder / role).symlink_to((real / name).resolve())
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    rows = [json.loads(line) for line in (real / "train.jsonl").read_text().splitlines()[:n_prompts]]
    with (folder / "prompts.jsonl").open("w") as file:
        for row in rows:
            turns = [{"role": "user", "content": row["prompt"]}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            file.write(json.dumps({"prompt": row["prompt"], "rendered": text}) + "\n")


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
