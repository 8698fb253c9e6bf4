"""Make the example's models and prompts: a teacher that uses the calculator, and a student that mostly fails to.

    python -m examples.tools.make_models --out DIR

Both are small Qwen3 models, trained here from scratch on complete trajectories, the teacher until it solves nearly all
problems, the student only until its calls are well-formed, but mostly wrong. A second call does nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from transformers.utils.logging import disable_progress_bar

from examples.quickstart.evaluate import load
from examples.quickstart.make_models import Recipe
from examples.quickstart.pretrain import ModelRecipe, train_from_scratch
from examples.tools.products import Problem, Script, accuracy, make_problems, write_jsonl
from gkd.errors import GkdError, ModelError

N_TRAIN, N_HELDOUT, N_VALIDATION = 16384, 256, 128
RECIPES = {
    "teacher": replace(Recipe().teacher, decay_from_accuracy=0.9, decay_steps=60),
    # The task is learned within a few steps, so the student is looked at often, and learns slowly.
    "student": replace(Recipe().student, peak_lr=1e-3, eval_every=2),
}


def make_models(out: Path, recipes: Mapping[str, ModelRecipe] = MappingProxyType(RECIPES)) -> None:
    """Make the models and the prompt files in `out`, unless they are there. Uses one thread.

    Raises:
        ModelError: a model does not reach its accuracy within the step limit.
    """
    report = out / "models.json"
    if report.is_file():
        print(f"{out}: already made; delete the folder to make it again", flush=True)
        return
    torch.set_num_threads(1)
    work = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)  # does not exist unless an earlier call was killed
    work.mkdir(parents=True)
    train, heldout = make_problems(0, N_TRAIN, N_HELDOUT)
    write_jsonl(train, work / "train.jsonl")
    write_jsonl(heldout, work / "heldout.jsonl")
    found = {role: _train(role, recipe, train, heldout, work / role) for role, recipe in recipes.items()}
    (work / "models.json").write_text(json.dumps(found, indent=1) + "\n")
    work.rename(out)


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


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.tools.make_models", description="Make the models.")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    disable_progress_bar()
    try:
        make_models(parser.parse_args().out)
    except GkdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
