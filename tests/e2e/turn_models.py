"""Small models that act in the environments of `turn_environments`, for tests of whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from examples.quickstart.pretrain import ModelRecipe, train_from_scratch
from examples.tools.products import Script, make_problems, write_jsonl

# A model that has learned the form of a call, and hardly anything else: its turns differ from sample to sample.
RECIPE = ModelRecipe(
    hidden_size=64,
    intermediate_size=128,
    n_layers=1,
    n_heads=4,
    seed=0,
    batch_size=16,
    warmup_steps=5,
    peak_lr=6e-3,
    eval_every=40,
    step_limit=40,
    stop_accuracy=0.0,
    min_accuracy=0.0,
    max_accuracy=1.0,
)


def small_models(out: Path) -> Path:
    """Make models of examples/tools with hardly any training, and prompts of its task."""
    out.mkdir(parents=True)
    script, problems = Script(), make_problems(0, 512, 64)
    for name, part in zip(("train", "heldout"), problems, strict=True):
        write_jsonl(part, out / f"{name}.jsonl")
    sequences = [script.trajectory(problem) for problem in problems[0]]
    for seed, role in enumerate(("student", "teacher")):
        recipe = replace(RECIPE, seed=seed)
        model, _, _ = train_from_scratch(role, recipe, script.tokenizer, sequences, lambda _: (0.0, 1.0))
        model.save_pretrained(out / role)
        script.tokenizer.save_pretrained(out / role)
    return out
