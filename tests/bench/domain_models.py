"""Make the models of `tests.bench.bench_domains`: a teacher for each of two tasks, and a student that learns both.

addition    358+467=  ->  8+7=15,5+6+1=12,3+4+1=08;825    28 tokens: the task and the teacher of the quickstart
sums        3584<     ->  ;3860                            6 tokens: running sums of the digits, modulo 10
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from examples.quickstart import pretrain
from examples.quickstart.addition import HIGHEST, LOWEST, Problem, build_tokenizer, make_problems, worked
from examples.quickstart.evaluate import greedy_score, load
from examples.quickstart.make_models import make_models
from examples.quickstart.pretrain import ModelRecipe

N_TRAIN, N_HELDOUT = 6000, 256
DOMAINS = ("addition", "sums")
_TEACHER = ModelRecipe(
    hidden_size=128,
    intermediate_size=384,
    n_layers=3,
    n_heads=4,
    seed=2,
    decay_from_accuracy=0.8,
    stop_accuracy=0.995,
    step_limit=1500,
    min_accuracy=0.98,
    max_accuracy=1.0,
)
_STUDENT = ModelRecipe(
    hidden_size=128,
    intermediate_size=256,
    n_layers=2,
    n_heads=4,
    seed=3,
    eval_every=10,
    stop_accuracy=0.05,
    step_limit=1000,
    min_accuracy=0.0,
    max_accuracy=0.4,
)


@dataclass(frozen=True, slots=True)
class RunningSums(Problem):
    """Four digits, to be summed from the left modulo 10; its fields are where the digits come from."""

    @property
    def digits(self) -> str:
        return f"{self.left}{str(self.right)[-1]}"

    @property
    def prompt(self) -> str:
        return f"{self.digits}<"

    @property
    def answer(self) -> str:
        return "".join(str(total % 10) for total in accumulate(map(int, self.digits)))

    @property
    def response(self) -> str:
        return f";{self.answer}"


def problems(domain: str) -> tuple[list[Problem], list[Problem]]:
    """Return (train, held-out), disjoint."""
    if domain == "addition":
        return make_problems(0, N_TRAIN, N_HELDOUT)
    each = [RunningSums(left, LOWEST + last) for left in range(LOWEST, HIGHEST + 1) for last in range(10)]
    random.Random(0).shuffle(each)
    return list(each[N_HELDOUT : N_HELDOUT + N_TRAIN]), list(each[:N_HELDOUT])


def make(models: Path, out: Path) -> dict[str, dict[str, float]]:
    """Make what is missing: `models` as the quickstart, `out` with the rest. About three minutes on two cores.

    Returns:
        Greedy accuracy on the held-out problems of each domain: of its teacher, and of the student before.
    """
    report = out / "models.json"
    if not report.exists():
        make_models(models)
        torch.set_num_threads(1)
        train = {domain: problems(domain)[0] for domain in DOMAINS}
        held = {domain: problems(domain)[1] for domain in DOMAINS}
        _train("teacher", _TEACHER, train["sums"], out / "sums")
        mixed = [problem for pair in zip(train["addition"], train["sums"], strict=True) for problem in pair]
        _train("student", _STUDENT, mixed, out / "student")
        (out / "addition").symlink_to((models / "teacher").absolute())
        _write(out / "train.jsonl", {domain: train[domain] for domain in DOMAINS})
        _write(out / "heldout.jsonl", held)
        found = {
            domain: {
                role: greedy_score(load(out / folder), held[domain])[0]
                for role, folder in (("teacher", domain), ("student", "student"))
            }
            for domain in DOMAINS
        }
        report.write_text(json.dumps(found, indent=1) + "\n")
    measured: dict[str, dict[str, float]] = json.loads(report.read_text())
    return measured


def _train(role: str, recipe: ModelRecipe, train: Sequence[Problem], folder: Path) -> None:
    model, *_ = pretrain.train_from_scratch(
        role, recipe, build_tokenizer(), worked(train[:-256]), lambda model: greedy_score(model, train[-256:])
    )
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def _write(file: Path, by_domain: dict[str, list[Problem]]) -> None:
    rows = [
        {"prompt": problem.prompt, "answer": problem.answer, "domain": domain}
        for domain, each in by_domain.items()
        for problem in each
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
