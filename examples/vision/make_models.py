"""Make the example's models and prompts: a teacher that answers questions about pictures, and a student that cannot.

    python -m examples.vision.make_models --out DIR

Both are LLaVA models: a vision tower of CLIP, a projection and a Llama. The teacher is trained here from scratch until
it answers nearly all questions. The student has the teacher's tower and projection, and random weights in its language
model. A second call does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, GenerationConfig, LlavaConfig, LlavaForConditionalGeneration

from examples.quickstart.evaluate import load
from examples.quickstart.make_models import make_once
from examples.quickstart.pretrain import IGNORED, Batch, ModelRecipe, train_model
from examples.vision.pictures import PATCH, SIDE, Problem, accuracy, build_processor, inputs, make_problems, write_rows
from gkd.errors import ModelError

N_TRAIN, N_VALIDATION = 4096, 192  # the last rows of the training file; the teacher is not trained on them
HELDOUT_SEED, N_HELDOUT = 1, 256
TEACHER = ModelRecipe(
    hidden_size=64,
    intermediate_size=128,
    n_layers=2,
    n_heads=2,
    seed=0,
    batch_size=64,
    peak_lr=1e-3,
    decay_from_accuracy=0.8,
    decay_steps=150,
    eval_every=50,
    stop_accuracy=0.98,
    step_limit=1000,
    min_accuracy=0.95,
    max_accuracy=1.0,
)


def build_model(recipe: ModelRecipe, processor: Any) -> LlavaForConditionalGeneration:
    """Return a randomly initialized float32 LLaVA. Seeds torch's global generator."""
    torch.manual_seed(recipe.seed)
    tokenizer = processor.tokenizer
    text = {
        "model_type": "llama",
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.n_layers,
        "num_attention_heads": recipe.n_heads,
        "num_key_value_heads": 1,
        "head_dim": 32,  # the smallest that vLLM's CPU attention supports
        "vocab_size": len(tokenizer),
        "initializer_range": 0.06,  # as in `examples.quickstart.pretrain.build_model`
    }
    sizes = {name: text[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    # LLaVA reads the features in front of the tower's last layer.
    tower = {"model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": SIDE, "patch_size": PATCH}
    image_token = tokenizer.convert_tokens_to_ids(processor.image_token)
    model = LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=tower | sizes, image_token_index=image_token)
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def make_models(out: Path) -> dict[str, float]:
    """Make the models and the prompt files in `out`, and return the measurements of the teacher.

    Raises:
        ModelError: the teacher does not reach its accuracy within the step limit.
    """
    processor = build_processor()
    train = make_problems(0, N_TRAIN)
    heldout = make_problems(HELDOUT_SEED, N_HELDOUT)
    write_rows(train, out / "train.parquet")
    write_rows(heldout, out / "heldout.parquet")
    teacher = build_model(TEACHER, processor)
    validation = train[-N_VALIDATION:]
    batches = _batches(processor, train[:-N_VALIDATION], TEACHER)
    steps, _ = train_model("teacher", TEACHER, teacher, batches, lambda: (accuracy(teacher, validation), 1.0))
    student = build_model(replace(TEACHER, seed=1), processor)
    student.model.vision_tower = teacher.model.vision_tower
    student.model.multi_modal_projector = teacher.model.multi_modal_projector
    _save(teacher, processor, out / "teacher")
    _save(student, processor, out / "student")
    solved = accuracy(load(out / "teacher", AutoModelForImageTextToText), heldout)
    if solved < TEACHER.min_accuracy:
        raise ModelError(
            f"the teacher answers {solved:.1%} of held-out questions; required: {TEACHER.min_accuracy:.0%}"
        )
    print(f"teacher | done: {solved:.1%} of the held-out questions, {steps} steps", flush=True)
    return {"steps": steps, "accuracy": solved}


def _batches(processor: Any, problems: Sequence[Problem], recipe: ModelRecipe) -> Iterator[Batch]:
    """Yield shuffled batches endlessly. The responses are learned."""
    made = inputs(processor, problems, answered=True)
    labels = torch.full_like(made["input_ids"], IGNORED)
    for row, each in enumerate(problems):
        n = len(processor.tokenizer(each.response)["input_ids"]) + 1
        labels[row, -n:] = made["input_ids"][row, -n:]
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        for rows in torch.randperm(len(problems), generator=generator).split(recipe.batch_size):
            yield {name: tensor[rows] for name, tensor in made.items()}, labels[rows]


def _save(model: LlavaForConditionalGeneration, processor: Any, folder: Path) -> None:
    """Save a model and its processor. The tensors get the hub's names: vLLM does not read transformers 5's."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    sys.exit(make_once(make_models, "examples.vision.make_models"))
