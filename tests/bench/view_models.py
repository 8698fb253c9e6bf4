"""Make the initial models of `tests.bench.bench_view`: they copy digits, and reverse them if the prompt has the rule.

copy       3584<             ->  ;3584
the rule   reverse:3584<     ->  ;4853
letters    dgka^             ->  ;DGKA    in training as they are, without the rule
capitals   DGKA_             ->  ;dgka    not in training
"""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.quickstart import pretrain
from examples.quickstart.addition import LOWEST, Problem, build_tokenizer, worked
from examples.quickstart.evaluate import greedy_score
from examples.quickstart.pretrain import ModelRecipe

RULE = "reverse:"
N_TRAIN, N_KEPT, N_HELDOUT = 6000, 2000, 256


@dataclass(frozen=True, slots=True)
class Line(Problem):
    """A text and what follows it; the operands of a sum are not used."""

    text: str
    result: str

    @property
    def prompt(self) -> str:
        return self.text

    @property
    def answer(self) -> str:
        return self.result

    @property
    def response(self) -> str:
        return f";{self.result}"


def line(text: str, result: str) -> Problem:
    return Line(LOWEST, LOWEST, text, result)


def digits() -> tuple[list[str], list[str]]:
    """Return (train, held-out): four digits each, disjoint, none the same backwards."""
    each = [f"{number:04d}" for number in range(10000)]
    each = [number for number in each if number != number[::-1]]
    random.Random(0).shuffle(each)
    return each[N_HELDOUT : N_HELDOUT + N_TRAIN], each[:N_HELDOUT]


def letters(n: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(string.ascii_lowercase, k=4)) for _ in range(n)]


def make(folder: Path, seed: int) -> None:
    """Train an initial model, unless `folder` has it, and write its prompt files. Two minutes on one core."""
    if (folder / "heldout.jsonl").exists():
        return
    torch.set_num_threads(1)
    train, held_out = digits()
    problems = [line(f"{number}<", number) for number in train[:-256]]
    problems += [line(f"{RULE}{number}<", number[::-1]) for number in train[:-256]]
    problems += [line(f"{word}^", word.upper()) for word in letters(len(train), seed)]
    problems += [line(f"{word.upper()}_", word) for word in letters(len(train), seed + 10)]
    checked = [line(f"{number}<", number) for number in train[-128:]]
    checked += [line(f"{RULE}{number}<", number[::-1]) for number in train[-256:-128]]
    recipe = ModelRecipe(
        hidden_size=128,
        intermediate_size=256,
        n_layers=2,
        n_heads=4,
        seed=seed,
        batch_size=64,
        decay_from_accuracy=0.8,
        stop_accuracy=0.995,
        step_limit=1500,
        min_accuracy=0.98,
        max_accuracy=1.0,
    )
    model, *_ = pretrain.train_from_scratch(
        f"model {seed}", recipe, build_tokenizer(), worked(problems), lambda model: greedy_score(model, checked)
    )
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    kept = [{"prompt": f"{word}^", "answer": word.upper(), "teacher": ""} for word in letters(N_KEPT, seed + 20)]
    rule, heldout = (
        [{"prompt": f"{number}<", "answer": number[::-1], "teacher": f"{RULE}{number}<"} for number in numbers]
        for numbers in (train, held_out)
    )
    for name, rows in (("train", rule + kept), ("rule", rule), ("heldout", heldout)):  # the last one is looked for
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
