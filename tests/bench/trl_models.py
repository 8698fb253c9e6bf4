"""Models and prompts of `bench_trl`, the same files for both programs: random weights and 32 tokens, or a real pair.

The head's weights are so small that every token has a probability of nearly 1/32, also the end-of-sequence token.
Response lengths are therefore geometric with mean 32 on both sides, and cut at the shape's limit. The learning rate is
so small that this does not change.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

VOCAB, N_PROMPT = 32, 8
PAD, EOS = 0, 1
LEARNING_RATE = 1e-6
GPU_SHARE = 0.2  # of the engine, in both programs
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
    goal: float | None  # ratio to TRL
    dtype: str = "float32"
    is_real: bool = False  # 12 of SmolLM2-135M-Instruct's 30 layers as the student, all of them as the teacher
    micro_batch: int = 0  # sequences; 0: all of a step
    trl_micro_batch: int = 0
    device: str = "cpu"
    is_colocated: bool = False  # models, engine and teacher on one device
    is_tiny: bool = False  # a rehearsal of such a run

    @property
    def max_prompt(self) -> int:
        if self.is_colocated:
            return self.max_response
        return 64 if self.is_real else N_PROMPT

    @property
    def topk(self) -> int:
        """Return the length of our teacher's list; TRL's loss has the whole vocabulary."""
        return 64 if self.is_real else VOCAB

    def on(self, device: str, *, is_tiny: bool) -> Shape:
        """Return this shape for a device. A colocated one is tiny on a CPU, too."""
        if not self.is_colocated or (device == "cuda" and not is_tiny):
            return self
        small = replace(self, student=(64, 2), teacher=(128, 3), max_response=16, batch=8, goal=None, is_tiny=True)
        dtype = self.dtype if device == "cuda" else "float32"
        return replace(small, micro_batch=4, trl_micro_batch=2, dtype=dtype, device=device)


SHAPES = {
    "long_tail": Shape((256, 4), (384, 6), 256, 64, steps=10, trl_steps=4, goal=3.0),
    "short": Shape((64, 2), (128, 3), 24, 256, steps=30, trl_steps=20, goal=0.7),
    "real": Shape((576, 12), (576, 30), 64, 16, steps=4, trl_steps=3, goal=2.0, is_real=True, micro_batch=2),
    "real_bfloat16": Shape((576, 12), (576, 30), 64, 16, 4, 3, goal=2.0, dtype="bfloat16", is_real=True, micro_batch=2),
    # Qwen2.5-1.5B's shape and 7B's, and prompts as long as responses
    "card": Shape(
        (1536, 28), (3584, 28), 256, 64, 4, 4, 2.0, "bfloat16", False, 32, 16, device="cuda", is_colocated=True
    ),
}


def make_files(shape: Shape, folder: Path, n_prompts: int) -> None:
    """Write student, teacher and `prompts.jsonl` into `folder`."""
    vocab = VOCAB
    if shape.is_colocated:
        vocab = _save_card_models(shape, folder)
    else:
        _save_model(folder / "student", *shape.student, seed=1)
        _save_model(folder / "teacher", *shape.teacher, seed=2)
    rng = np.random.default_rng(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(n_prompts):
            prompt = " ".join(f"t{token}" for token in rng.integers(2, vocab, shape.max_prompt))
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


def _save_card_models(shape: Shape, folder: Path) -> int:
    """Write both models with weights of the usual size, made on the device. Returns their vocabulary."""
    import torch

    from tests.bench.student_case import SIZES, save_model, save_tokenizer
    from tests.gpu import bench_student_cuda as large

    student, teacher = (large.COMMON | large.SHAPES[name] for name in ("1.5b", "7b"))
    if shape.is_tiny:
        student = teacher = SIZES | {"vocab_size": 1024}  # a block of TRL's kernels, whose interpreter is slow
    for role, sizes, (hidden, layers) in (("student", student, shape.student), ("teacher", teacher, shape.teacher)):
        own = sizes | {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": student["vocab_size"]}
        save_model(folder / role, device=shape.device, dtype=getattr(torch, shape.dtype), **own)
        save_tokenizer(folder / role, student["vocab_size"])
    torch.cuda.empty_cache()  # the runs are other processes
    return int(student["vocab_size"])


def _save_model(folder: Path, hidden_size: int, n_layers: int, seed: int) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from tests.bench.student_case import save_tokenizer

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
    save_tokenizer(folder, VOCAB)
