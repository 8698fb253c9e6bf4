"""Test examples.quickstart.make_models: made once, complete or absent results, measured accuracies."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from examples.quickstart import make_models as maker
from examples.quickstart.addition import Problem, build_tokenizer, make_problems, read_jsonl, worked
from examples.quickstart.evaluate import greedy_decode, greedy_score, score
from examples.quickstart.make_models import Recipe, make_models
from examples.quickstart.pretrain import ModelRecipe, build_model, lr_share, train_from_scratch
from gkd.errors import ConfigError, ModelError

# Stops at its first evaluation whatever it has learned: these tests are about the machinery, not about addition.
TINY = ModelRecipe(
    hidden_size=32,
    intermediate_size=32,
    n_layers=1,
    n_heads=2,
    seed=0,
    batch_size=4,
    eval_every=1,
    stop_accuracy=0.0,
    step_limit=2,
    min_accuracy=0.0,
    max_accuracy=1.0,
    min_well_formed=0.0,
)
TINY_RECIPE = Recipe(teacher=TINY, student=replace(TINY, seed=1), n_train=24, n_validation=8, n_heldout=8)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("quickstart") / "models", recipe=TINY_RECIPE)


def test_everything_the_quickstart_needs_is_there(made: Path) -> None:
    """If this fails, an engine that loads the folders finds no weights, no tokenizer, no end of sequence, or bf16."""
    report = json.loads((made / "models.json").read_text())
    for role in ("teacher", "student"):
        model = AutoModelForCausalLM.from_pretrained(made / role)
        tokenizer = AutoTokenizer.from_pretrained(made / role)
        assert model.config.model_type == "qwen3"
        assert model.config.vocab_size == len(tokenizer) == 258
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
        assert report[role]["steps"] == 1
        assert report[role]["n_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert len(read_jsonl(made / "train.jsonl")) == 24
    assert len(read_jsonl(made / "heldout.jsonl")) == 8
    assert [entry.name for entry in made.parent.iterdir()] == ["models"], "a temporary folder was left behind"


def test_second_call_does_nothing(made: Path) -> None:
    """If this fails, every quickstart run pays for the training again, or swaps models under a running one."""
    before = (made / "teacher" / "model.safetensors").stat()
    make_models(made, recipe=TINY_RECIPE)
    after = (made / "teacher" / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("why", ["recipe", "force"])
def test_other_models_are_made_on_demand(tmp_path: Path, why: str) -> None:
    """If this fails, a changed recipe or --force still returns the old models."""
    out = make_models(tmp_path / "models", recipe=TINY_RECIPE)
    inode = (out / "student" / "config.json").stat().st_ino
    recipe = TINY_RECIPE
    if why == "recipe":
        recipe = replace(recipe, student=replace(recipe.student, peak_lr=1e-3))
    make_models(out, recipe=recipe, force=why == "force")
    assert (out / "student" / "config.json").stat().st_ino != inode
    assert json.loads((out / "models.json").read_text())["recipe"]["student"]["peak_lr"] == recipe.student.peak_lr


def test_folder_with_other_content_is_not_changed(tmp_path: Path) -> None:
    """If this fails, `--out` pointed at someone's work deletes it."""
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(ConfigError):
        make_models(tmp_path, recipe=TINY_RECIPE, force=True)
    assert (tmp_path / "thesis.txt").read_text() == "years"


def test_step_limit_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """If this fails, the quickstart continues with a teacher that cannot add, or later finds an incomplete result."""
    recipe = replace(TINY_RECIPE, teacher=replace(TINY, stop_accuracy=0.9))
    with pytest.raises(ModelError):
        make_models(tmp_path / "models", recipe=recipe)
    assert list(tmp_path.iterdir()) == []


def test_a_model_outside_its_band_is_an_error(tmp_path: Path) -> None:
    """If this fails, a student that can already add (or a teacher that cannot) is returned."""
    recipe = replace(TINY_RECIPE, student=replace(TINY, min_accuracy=0.5))
    with pytest.raises(ModelError):
        make_models(tmp_path / "models", recipe=recipe)
    assert list(tmp_path.iterdir()) == []


def test_pretraining_lowers_the_loss_of_the_response() -> None:
    """If this fails, labels, mask or optimizer are wrong and no recipe can reach its accuracy."""
    recipe = replace(TINY, hidden_size=64, intermediate_size=64, batch_size=16, eval_every=60, step_limit=60)
    train, validation = make_problems(seed=0, n_train=64, n_heldout=8)
    fresh = build_model(recipe, build_tokenizer())
    trained, steps, _ = trained_on(recipe, train, validation)
    assert steps == 60
    assert response_loss(fresh, train) > 4.0  # near log 258, a fresh model's
    assert response_loss(trained, train) < 1.5


def trained_on(recipe: ModelRecipe, train: list[Problem], validation: list[Problem]) -> tuple[Any, int, float]:
    score = partial(greedy_score, problems=validation)
    return train_from_scratch("teacher", recipe, build_tokenizer(), worked(train), score)


def response_loss(model: torch.nn.Module, problems: list[Problem]) -> float:
    """Return the mean cross entropy of the responses and their end-of-sequence tokens, one sequence at a time; nats."""
    tokenizer = build_tokenizer()
    total, count = 0.0, 0
    for problem in problems:
        prompt = tokenizer(problem.prompt)["input_ids"]
        response = tokenizer(problem.response)["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([prompt + response])).logits[0].log_softmax(dim=-1)
        for j, token in enumerate(response):
            total -= float(logprobs[len(prompt) - 1 + j, token])
        count += len(response)
    return total / count


def test_learning_rate_decays_only_after_its_start() -> None:
    """If this fails, the learning rate falls too early, and the teacher does not reach its accuracy."""
    recipe = replace(TINY, warmup_steps=10, decay_steps=100, final_lr_share=0.05)
    assert [lr_share(recipe, step, None) for step in (1, 5, 10, 900)] == [0.1, 0.5, 1.0, 1.0]
    assert [lr_share(recipe, step, 300) for step in (301, 350, 400, 900)] == pytest.approx([0.99, 0.5, 0.05, 0.05])


def test_training_continues_to_the_end_of_the_decay() -> None:
    """If this fails, training stops at a single high evaluation while the learning rate is still high."""
    recipe = replace(TINY, decay_from_accuracy=0.0, decay_steps=3, step_limit=9)
    train, validation = make_problems(seed=0, n_train=8, n_heldout=2)
    _, steps, _ = trained_on(recipe, train, validation)
    assert steps == 4  # the decay is started by the evaluation after step 1


def test_batched_decoding_equals_decoding_one_by_one() -> None:
    """If this fails, left padding or positions are wrong, and accuracies depend on the batch."""
    model = build_model(replace(TINY, n_layers=2), build_tokenizer())
    prompts = [build_tokenizer()(text)["input_ids"] for text in ("358+467=", "1+2=", "12345+67890=", "7=")]
    expected = [decode_without_cache(model, prompt, n_tokens=12) for prompt in prompts]
    assert len({tuple(response) for response in expected}) == len(prompts), "equal responses would prove nothing"
    # The third token of the first response plays end-of-sequence: rows then end at different steps, or never.
    model.generation_config.eos_token_id = eos_id = expected[0][2]
    expected = [ids[: ids.index(eos_id) + 1] if eos_id in ids else ids for ids in expected]
    assert len({len(response) for response in expected}) > 1
    assert greedy_decode(model, prompts, max_tokens=12) == expected


def decode_without_cache(model: PreTrainedModel, prompt: list[int], n_tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n_tokens):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_score_of_correct_wrong_malformed_and_endless_responses() -> None:
    """If this fails, the quickstart's accuracy is not the share of correct answers."""
    problems = [Problem(100 + i, 200) for i in range(4)]
    responses = [
        problems[0].response + "<eos>",
        problems[0].response + "<eos>",  # well-formed, but the answer to another problem
        problems[2].response + ",1<eos>",  # goes on after the answer
        problems[3].response,  # right, but never ends
    ]
    ids = [build_tokenizer()(response)["input_ids"] for response in responses]
    assert score(ids, problems) == (0.25, 0.5) and score(ids[:2], problems[:2]) == (0.5, 1.0)


def test_the_command_answers_a_mistake_with_one_line(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, the command that the documentation shows prints a traceback for a user's mistake."""
    assert maker.main(["--out", str(made / "teacher")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
