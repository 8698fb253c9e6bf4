"""Make the quickstart's models and prompts: a teacher that can add, and a student that cannot yet.

    python -m gkd.quickstart.make_models --out DIR [--force] [--threads 1]

Both are Qwen3 models, trained here from scratch on worked solutions, concurrently in two processes:

- the teacher until it solves nearly all problems,
- the student only until it has learned the format, so that its solutions are well-formed but mostly wrong.

Training stops at a measured greedy accuracy on validation problems, not after a fixed number of steps, so machines with
different floating-point arithmetic get models of the same quality. The accuracy in `models.json` is measured on the
held-out problems. A second call with the same recipe does nothing.

    DIR/teacher/  DIR/student/    Hugging Face folders: float32 safetensors, tokenizer, generation config
    DIR/train.jsonl  DIR/heldout.jsonl    one {"prompt", "answer"} per line
    DIR/models.json    the cache key, the recipe and the measurements

There are no checkpoints: training takes about a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from gkd.errors import ClusterError, ConfigError, GkdError, ModelError
from gkd.quickstart import addition, evaluate, pretrain
from gkd.quickstart.addition import build_tokenizer, make_problems, write_jsonl
from gkd.quickstart.evaluate import greedy_score
from gkd.quickstart.pretrain import ModelRecipe
from teacher_server.wire.threads import thread_env

# Files of a finished result, in addition to `models.json`.
PRODUCTS = ("teacher/model.safetensors", "student/model.safetensors", "train.jsonl", "heldout.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All parameters of the result; part of the cache key."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements of a finished model, for `models.json`."""

    n_parameters: int
    seed: int
    steps: int
    seconds: float
    validation_accuracy: float
    accuracy: float
    well_formed: float


def make_models(
    out: Path, *, recipe: Recipe | None = None, force: bool = False, threads: int = 1, in_process: bool = False
) -> Path:
    """Make the models and the prompt files in `out`, unless the result of this recipe already exists.

    `out` is complete or absent: all files are written to a temporary folder in the same parent, which is then renamed.

    Args:
        out: the new folder; an older result of this function is replaced.
        recipe: the default `Recipe()` if None.
        force: make everything again even if it already exists.
        threads: torch threads per process.
        in_process: train one model after the other in this process (for tests and debuggers).

    Returns: `out`.
    Raises: ConfigError if `out` exists and is not a result of this function; ModelError if a model does not
        reach its accuracy within the step limit; ClusterError if a training process dies.
    """
    recipe = recipe or Recipe()
    out = out.absolute()
    key = cache_key(recipe)
    if not force and _is_complete(out, key):
        print(f"{out}: already made with this recipe; use --force to make it again", flush=True)
        return out
    if out.exists() and any(out.iterdir()) and not (out / "models.json").is_file():
        raise ConfigError("out", str(out), "the folder has other content.", "choose a new folder, or empty this one.")

    started = time.monotonic()
    work = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    work.mkdir(parents=True)
    try:
        train, heldout = make_problems(recipe.data_seed, recipe.n_train, recipe.n_heldout)
        write_jsonl(train, work / "train.jsonl")
        write_jsonl(heldout, work / "heldout.jsonl")
        jobs = [_Job(role, recipe, work / role, threads) for role in ("teacher", "student")]
        measured = {job.role: _train_role(job) for job in jobs} if in_process else dict(_train_in_parallel(jobs))
        report = {
            "key": key,
            "seconds": round(time.monotonic() - started, 1),
            "teacher": asdict(measured["teacher"]),
            "student": asdict(measured["student"]),
            "recipe": asdict(recipe),
        }
        (work / "models.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        _replace_folder(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # does not exist after the rename
    print(f"{out}: made in {time.monotonic() - started:.0f} s", flush=True)
    return out


def cache_key(recipe: Recipe) -> str:
    """Return a digest of the recipe and of the source code that uses it."""
    digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
    for source in (addition.__file__, evaluate.__file__, pretrain.__file__, __file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Job:
    """Arguments of a training process."""

    role: str  # "teacher" | "student"
    recipe: Recipe
    folder: Path
    threads: int


def _train_role(job: _Job) -> Measured:
    """Train, save and measure one of the two models. Sets this process's torch threads."""
    torch.set_num_threads(job.threads)
    started = time.monotonic()
    model_recipe: ModelRecipe = getattr(job.recipe, job.role)
    train, heldout = make_problems(job.recipe.data_seed, job.recipe.n_train, job.recipe.n_heldout)
    n_trained_on = job.recipe.n_train - job.recipe.n_validation
    model, steps, validation_accuracy = pretrain.train_from_scratch(
        job.role, model_recipe, train[:n_trained_on], train[n_trained_on:]
    )
    model.save_pretrained(job.folder)
    build_tokenizer().save_pretrained(job.folder)
    # Measured on the saved model, because the quickstart starts from it.
    score = greedy_score(job.folder, heldout)
    low, high = model_recipe.min_accuracy, model_recipe.max_accuracy
    if not (low <= score.accuracy <= high and score.well_formed >= model_recipe.min_well_formed):
        raise ModelError(
            f"the {job.role} solves {score.accuracy:.1%} of held-out problems, {score.well_formed:.1%} well-formed; "
            f"required: {low:.0%} to {high:.0%}, {model_recipe.min_well_formed:.0%} well-formed. "
            f"Fix: change {job.role}.stop_accuracy or {job.role}.seed in the recipe."
        )
    measured = Measured(
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        seed=model_recipe.seed,
        steps=steps,
        seconds=round(time.monotonic() - started, 1),
        validation_accuracy=validation_accuracy,
        accuracy=score.accuracy,
        well_formed=score.well_formed,
    )
    print(f"{job.role:>7} | done: {score.accuracy:.1%} of the held-out problems, {steps} steps", flush=True)
    return measured


def _train_in_parallel(jobs: list[_Job]) -> Iterator[tuple[str, Measured]]:
    """Run each job in a separate process. The first error stops the others and is raised here."""
    context = multiprocessing.get_context(
        "spawn"
    )  # a forked child would inherit torch's thread pool in an undefined state
    os.environ.update(thread_env(jobs[0].threads))  # read when a child first loads torch
    processes = []
    roles: dict[Connection, str] = {}  # of the running processes, by the pipe for their result
    try:
        for job in jobs:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(job, theirs), name=job.role, daemon=True)
            process.start()
            theirs.close()  # the child has the only writing end, so its death is an end of file here
            processes.append(process)
            roles[ours] = job.role
        while roles:
            for answer in multiprocessing.connection.wait(list(roles)):
                assert isinstance(answer, Connection)  # the type stub also allows sockets and handles
                role = roles[answer]
                try:
                    result: Measured | GkdError = answer.recv()
                except EOFError:
                    raise ClusterError(
                        f"the process that trains the {role} died without a result; its output is above. "
                        "Fix: if it ran out of memory, free some and run this again."
                    ) from None
                if isinstance(result, GkdError):
                    raise result
                del roles[answer]
                yield role, result
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _child(job: _Job, answer: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the parent terminates this one
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    disable_progress_bar()  # progress bars of two processes would break the log lines
    try:
        answer.send(_train_role(job))
    except GkdError as error:
        answer.send(error)


def _exit_with_parent() -> None:
    """Block until the parent has ended, also by SIGKILL; then end this process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _is_complete(out: Path, key: str) -> bool:
    """Return whether `out` has a finished result with this cache key."""
    try:
        report = json.loads((out / "models.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # missing or damaged: make it again
    return isinstance(report, dict) and report.get("key") == key and all((out / name).exists() for name in PRODUCTS)


def _replace_folder(new: Path, out: Path) -> None:
    """Replace `out` by `new`. A reader finds the old result, none for an instant, or the new one, but never a mix."""
    old = out.with_name(f"{new.name}.old")
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m gkd.quickstart.make_models", description="Make the quickstart's models."
    )
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--force", action="store_true", help="make everything again even if it already exists")
    parser.add_argument("--threads", type=int, default=1, help="torch threads for each of the two processes")
    options = parser.parse_args(arguments)
    try:
        make_models(options.out, force=options.force, threads=options.threads)
    except GkdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # By default SIGTERM ends Python at once. As an exit it unwinds: children end, the temporary folder is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
