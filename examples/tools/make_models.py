"""Make the example's models and prompts: a teacher that uses the calculator, and a student that mostly fails to.

    python -m examples.tools.make_models --out DIR

Both are small Qwen3 models, trained here from scratch on complete trajectories, the teacher until it solves nearly all
problems, the student only until its calls are well-formed, but mostly wrong. A second call does nothing.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from examples.quickstart.evaluate import load
from examples.quickstart.make_models import Recipe, make_once
from examples.quickstart.pretrain import ModelRecipe, train_from_scratch
from examples.tools.products import Problem, Script, accuracy, make_problems, write_jsonl
from gkd.errors import ModelError

N_TRAIN, N_HELDOUT, N_VALIDATION = 16384, 256, 128
RECIPES = {
    "teacher": replace(Recipe().teacher, decay_from_accuracy=0.9, decay_steps=60),
    # The task is learned within a few steps, so the student is looked at often, and learns slowly.
    "student": replace(Recipe().student, peak_lr=1e-3, eval_every=2),
}


def make_models(out: Path) -> dict[str, dict[str, float]]:
    """Make the models and the prompt files in `out`, and return the measurements of the models.

    Raises:
        ModelError: a model does not reach its accuracy within the step limit.
    """
    train, heldout = make_problems(0, N_TRAIN, N_HELDOUT)
    write_jsonl(train, out / "train.jsonl")
    write_jsonl(heldout, out / "heldout.jsonl")
    return {role: _train(role, recipe, train, heldout, out / role) for role, recipe in RECIPES.items()}


def _train(
    role: str, recipe: ModelRecipe, train: list[Problem], heldout: list[Problem], folder: Path
) -> dict[str, float]:
    """Train one of the two models, save it and return its measurements."""
    script, validation = Script(), train[-N_VALIDATION:]
    sequences = [script.trajectory(problem) for problem in train[:-N_VALIDATION]]

    def score(model: object) -> tuple[float, float]:
        return accuracy(model, validation), 1.0

    model, steps, _ = train_from_scratch(role, recipe, script.tokenizer, sequences, score)
    model.save_pretrained(folder)
    script.tokenizer.save_pretrained(folder)
    solved = accuracy(load(folder), heldout)
    if not recipe.min_accuracy <= solved <= recipe.max_accuracy:
        wanted = f"{recipe.min_accuracy:.0%} to {recipe.max_accuracy:.0%}"
        raise ModelError(f"the {role} solves {solved:.1%} of the held-out problems; required: {wanted}")
    print(f"{role:>7} | done: {solved:.1%} of the held-out problems, {steps} steps", flush=True)
    return {"steps": steps, "accuracy": solved}


if __name__ == "__main__":
    sys.exit(make_once(make_models, "examples.tools.make_models"))
