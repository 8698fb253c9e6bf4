"""Test examples.quickstart.make_models: made once, complete or absent results, measured accuracies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from examples.quickstart import make_models as maker
from examples.quickstart.addition import Problem, build_tokenizer, read_jsonl
from examples.quickstart.evaluate import greedy_decode, score
from examples.quickstart.make_models import Recipe, make_models
from examples.quickstart.pretrain import ModelRecipe, build_model
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


def test_other_models_are_made_on_demand(tmp_path: Path) -> None:
    """If this fails, a changed recipe or --force still returns the old models."""
    out = make_models(tmp_path / "models", recipe=TINY_RECIPE)
    changed = replace(TINY_RECIPE, student=replace(TINY_RECIPE.student, peak_lr=1e-3))
    for force in (False, True):
        inode = (out / "student" / "config.json").stat().st_ino
        make_models(out, recipe=changed, force=force)
        assert (out / "student" / "config.json").stat().st_ino != inode
        assert json.loads((out / "models.json").read_text())["recipe"]["student"]["peak_lr"] == 1e-3


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
