"""Make the quickstart's models and prompts: a teacher that can add, and a student that cannot yet.

    python -m examples.quickstart.make_models --out DIR [--force]

Both are Qwen3 models, trained here from scratch on worked solutions: the teacher until it solves nearly all problems,
the student only until its solutions are well-formed, but mostly wrong. Training stops at a measured accuracy, not after
a fixed number of steps, so machines with different floating-point arithmetic get models of the same quality.

    DIR/teacher/  DIR/student/    Hugging Face folders: float32 safetensors, tokenizer, generation config
    DIR/train.jsonl  DIR/heldout.jsonl    one {"prompt", "answer"} per line
    DIR/models.json    the recipe and the measurements

It takes about a minute; a second call with the same recipe does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from examples.quickstart.addition import Problem, build_tokenizer, make_problems, worked, write_jsonl
from examples.quickstart.evaluate import greedy_score, load
from examples.quickstart.pretrain import ModelRecipe, train_from_scratch
from gkd.errors import ConfigError, GkdError, ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All parameters of the result."""

    teacher: ModelRecipe = ModelRecipe(
        hidden_size=128,
        intermediate_size=384,
        n_layers=3,
        n_heads=4,
        seed=0,
        decay_from_accuracy=0.8,
        stop_accuracy=0.995,
        step_limit=1000,
        min_accuracy=0.98,
        max_accuracy=1.0,
    )
    student: ModelRecipe = ModelRecipe(
        hidden_size=128,
        intermediate_size=256,
        n_layers=2,
        n_heads=4,
        seed=1,
        eval_every=10,
        stop_accuracy=0.1,
        step_limit=1000,
        min_accuracy=0.02,
        max_accuracy=0.4,
    )
    data_seed: int = 0
    n_train: int = 16384
    n_validation: int = 256  # the last problems of the train split; not used for training
    n_heldout: int = 256


def make_models(out: Path, *, recipe: Recipe | None = None, force: bool = False) -> Path:
    """Make the models and the prompt files in `out`, unless it has the result of this recipe. Uses one thread.

    `out` is complete or absent: all files are written to a temporary folder in the same parent, which is then
    renamed.

    Args:
        out: the new folder; an older result of this function is replaced.
        recipe: the default `Recipe()` if None.
        force: make everything again even if it already exists.

    Returns: `out`.
    Raises: ConfigError if `out` exists and is not a result of this function; ModelError if a model does not
        reach its accuracy within the step limit.
    """
    recipe = recipe or Recipe()
    out = out.absolute()
    report = out / "models.json"
    if not force and report.is_file() and json.loads(report.read_text()).get("recipe") == asdict(recipe):
        print(f"{out}: already made with this recipe; use --force to make it again", flush=True)
        return out
    if out.exists() and any(out.iterdir()) and not report.is_file():
        raise ConfigError("out", str(out), "the folder has other content.", "choose a new folder, or empty this one.")

    started = time.monotonic()
    torch.set_num_threads(1)
    work = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    work.mkdir(parents=True)
    try:
        train, heldout = make_problems(recipe.data_seed, recipe.n_train, recipe.n_heldout)
        write_jsonl(train, work / "train.jsonl")
        write_jsonl(heldout, work / "heldout.jsonl")
        found: dict[str, Any] = {}
        for role, model_recipe in (("teacher", recipe.teacher), ("student", recipe.student)):
            found[role] = _train(role, model_recipe, train, recipe.n_validation, heldout, work / role)
        found |= {"seconds": round(time.monotonic() - started, 1), "recipe": asdict(recipe)}
        (work / "models.json").write_text(json.dumps(found, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # does not exist after the rename
    print(f"{out}: made in {time.monotonic() - started:.0f} s", flush=True)
    return out


def _train(
    role: str, recipe: ModelRecipe, train: list[Problem], n_validation: int, heldout: list[Problem], folder: Path
) -> dict[str, Any]:
    """Train one of the two models, save it and return its measurements for `models.json`."""
    started = time.monotonic()
    tokenizer, validation = build_tokenizer(), train[-n_validation:]
    model, steps, validation_accuracy = train_from_scratch(
        role, recipe, tokenizer, worked(train[:-n_validation]), lambda model: greedy_score(model, validation)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    accuracy, well_formed = greedy_score(load(folder), heldout)  # of the saved model: the quickstart starts from it
    low, high = recipe.min_accuracy, recipe.max_accuracy
    if not (low <= accuracy <= high and well_formed >= recipe.min_well_formed):
        raise ModelError(
            f"the {role} solves {accuracy:.1%} of held-out problems, {well_formed:.1%} well-formed; "
            f"required: {low:.0%} to {high:.0%}, {recipe.min_well_formed:.0%} well-formed. "
            f"Fix: change {role}.stop_accuracy or {role}.seed in the recipe."
        )
    print(f"{role:>7} | done: {accuracy:.1%} of the held-out problems, {steps} steps", flush=True)
    return {
        "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seed": recipe.seed,
        "steps": steps,
        "seconds": round(time.monotonic() - started, 1),
        "validation_accuracy": validation_accuracy,
        "accuracy": accuracy,
        "well_formed": well_formed,
    }


def make_once(make: Callable[[Path], Mapping[str, Any]], module: str) -> int:
    """Run `python -m MODULE --out DIR`: make the models of another example, unless they are there. Uses one thread.

    Args:
        make: fills a temporary folder, and returns the content of models.json.

    Returns: the exit code.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Make the models.")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    out: Path = parser.parse_args().out
    if (out / "models.json").is_file():
        print(f"{out}: already made; delete the folder to make it again", flush=True)
        return 0
    disable_progress_bar()
    torch.set_num_threads(1)
    work = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)  # does not exist unless an earlier call was killed
    work.mkdir(parents=True)
    try:
        found = make(work)
    except GkdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    (work / "models.json").write_text(json.dumps(found, indent=1) + "\n")
    work.rename(out)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.quickstart.make_models", description="Make the quickstart's models."
    )
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--force", action="store_true", help="make everything again even if it already exists")
    options = parser.parse_args(arguments)
    disable_progress_bar()
    try:
        make_models(options.out, force=options.force)
    except GkdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # By default SIGTERM ends Python at once. As an exit it unwinds: the temporary folder is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
