"""Models of `bench_tokenizers`: the quickstart's addition, with pairs of digits as tokens.

char     a token per byte, as the quickstart
left     pairs of digits from the left:  12345+67=  ->  12 34 5 + 67 =
right    pairs of digits from the right: 12345+67=  ->  1 23 45 + 67 =
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.quickstart.addition import EOS_TOKEN, PAD_TOKEN, Problem, build_tokenizer, extract_answer
from examples.quickstart.evaluate import greedy_decode
from examples.quickstart.pretrain import ModelRecipe, Parts, train_from_scratch

MAX_RESPONSE = 32
# A run of an odd number of digits begins (right) or ends (left) with a single one.
SPLITS = {"left": r"[0-9]{1,2}|[^0-9]", "right": r"[0-9]{1,2}(?=(?:[0-9]{2})*(?![0-9]))|[^0-9]"}
_TEACHER = ModelRecipe(
    hidden_size=128,
    intermediate_size=384,
    n_layers=3,
    n_heads=4,
    seed=0,
    batch_size=48,
    decay_from_accuracy=0.8,
    stop_accuracy=0.995,
    step_limit=3000,
    min_accuracy=0.99,
    max_accuracy=1.0,
)
_STUDENT = replace(
    _TEACHER,
    intermediate_size=256,
    n_layers=2,
    seed=1,
    batch_size=32,
    decay_from_accuracy=None,
    eval_every=5,
    stop_accuracy=0.06,
    min_accuracy=0.05,
    max_accuracy=0.085,
)
_MODELS = {"student_left": _STUDENT, "student_right": _STUDENT, "teacher_left": _TEACHER}


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE whose merges are the 100 pairs of digits, which `SPLITS` keeps apart; char: no merges."""
    if kind == "char":
        return build_tokenizer()
    vocab = build_tokenizer().get_vocab()
    pairs = [f"{n:02d}" for n in range(100)]
    vocab |= {pair: len(vocab) + i for i, pair in enumerate(pairs)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in pairs]))
    split = pre_tokenizers.Split(Regex(SPLITS[kind]), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"eos_token": EOS_TOKEN, "pad_token": PAD_TOKEN, "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **settings)


def make_models(out: Path, train: Sequence[Problem], heldout: Sequence[Problem]) -> dict[str, dict[str, float]]:
    """Make the folders of `_MODELS` that `out` lacks, with another seed if the accuracy is not as required."""
    out.mkdir(parents=True, exist_ok=True)
    report = out / "models.json"
    found: dict[str, dict[str, float]] = json.loads(report.read_text()) if report.exists() else {}
    for name in (name for name in _MODELS if name not in found):
        recipe, tokenizer = _MODELS[name], make_tokenizer(name.partition("_")[2])
        examples = _worked(tokenizer, train[:-256])

        def judge(model: Any, tokenizer: PreTrainedTokenizerFast = tokenizer) -> tuple[float, float]:
            return score(model, tokenizer, train[-256:])

        while name not in found:
            model, steps, _ = train_from_scratch(name, recipe, tokenizer, examples, judge)
            accuracy = score(model, tokenizer, heldout)[0]
            print(f"{name}, seed {recipe.seed}: {accuracy:.1%} after {steps} steps", file=sys.stderr, flush=True)
            if recipe.min_accuracy <= accuracy <= recipe.max_accuracy:
                model.save_pretrained(out / name)
                tokenizer.save_pretrained(out / name)
                found[name] = {"accuracy": accuracy, "steps": steps, "seed": recipe.seed}
                report.write_text(json.dumps(found, indent=1) + "\n")
            recipe = replace(recipe, seed=recipe.seed + 10)
    return found


def _worked(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> list[Parts]:
    return [
        [
            (tokenizer(problem.prompt)["input_ids"], False),
            ([*tokenizer(problem.response)["input_ids"], tokenizer.eos_token_id], True),
        ]
        for problem in problems
    ]


def score(model: Any, tokenizer: Any, problems: Sequence[Problem]) -> tuple[float, float]:
    """Return the greedy accuracy, and the share of responses that end and have an answer."""
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in problems]
    responses = greedy_decode(model, prompts, MAX_RESPONSE)
    answers = [
        extract_answer(tokenizer.decode(ids[:-1])) if ids[-1] == tokenizer.eos_token_id else None for ids in responses
    ]
    right = sum(answer == problem.answer for answer, problem in zip(answers, problems, strict=True))
    return right / len(problems), sum(answer is not None for answer in answers) / len(problems)


def canonical_share(tokenizer: Any, responses: Sequence[Sequence[int]]) -> float:
    """Return the share of responses that are the tokenizer's own encoding of their text."""
    texts = [[i for i in ids if i != tokenizer.eos_token_id] for ids in responses]
    return sum(tokenizer(tokenizer.decode(ids))["input_ids"] == ids for ids in texts) / len(texts)
