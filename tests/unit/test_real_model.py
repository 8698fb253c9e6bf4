"""The example with a real model: all that needs no download. tests/e2e/test_real_model.py runs all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples.real_model.model import shrink
from examples.real_model.outcome import as_text, one_sentence, read
from examples.real_model.prompts import write_prompts
from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.errors import CheckpointError
from tests.dist.megatron_reference import make_hf_folder
from tests.unit.chat_templates import tokenizer


@pytest.mark.parametrize("task", ["rule", "shrink"])
def test_the_settings_pass_the_checks(task: str) -> None:
    """Fails if a key of the example is renamed or removed without it."""
    config = load_config(f"examples/real_model/{task}.yaml")
    check_config(config)
    assert config.trainer.device == "cpu" and config.data.val_files


def test_heldout_prompts_have_subjects_of_their_own(tmp_path: Path) -> None:
    """Fails if the example evaluates on what it trains on, or if its prompts differ between two runs."""
    write_prompts(tmp_path)
    first = {name: (tmp_path / f"{name}.jsonl").read_text() for name in ("train", "heldout")}
    write_prompts(tmp_path)
    assert first == {name: (tmp_path / f"{name}.jsonl").read_text() for name in first}
    train, heldout = ([json.loads(line)["prompt"] for line in first[name].splitlines()] for name in first)
    assert len(set(train)) == len(train) >= 900 and len(set(heldout)) == len(heldout) == 32
    assert not set(train) & set(heldout)
    assert not [
        prompt for prompt in train if any(word in prompt for word in ("bread", "cheese", "rice", "hiccup", "kite"))
    ]


def test_the_smaller_student_has_evenly_chosen_layers(tmp_path: Path) -> None:
    """Fails if the cut loses the first or the last layer, or changes another weight."""
    from transformers import AutoModelForCausalLM

    make_hf_folder(tmp_path / "whole", "llama3_rope", n_layers=5)
    tokenizer().save_pretrained(tmp_path / "whole")
    shrink(tmp_path / "whole", 3, tmp_path / "small")
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "small"))
    for name, weight in after.items():
        where = name
        for new, old in ((1, 2), (2, 4)):
            where = where.replace(f"layers.{new}.", f"layers.{old}.") if f"layers.{new}." in name else where
        assert torch.equal(weight, before[where]), name
    assert len({name.split(".")[2] for name in after if ".layers." in name}) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Paris is the capital.", True),
        ("It is 3.5 m tall.", True),
        ('He said "no."', True),
        ("Really?!", True),
        ("One. Two.", False),
        ("cut off in the", False),
        ("A list:\n1. apples.", False),
        ("", False),
    ],
)
def test_one_sentence(text: str, expected: bool) -> None:
    """Fails if the share that the example prints counts something else than single sentences."""
    assert one_sentence("", text, {}) == expected


def test_the_outcome_compares_the_first_and_the_last_evaluation(tmp_path: Path) -> None:
    """Fails if the printed figures are not those of the run's two evaluations."""
    (tmp_path / "samples").mkdir()
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("Why?", "What is tea?")))
    texts = {0: ("Well. It is so.", "Tea"), 2: ("no", "no"), 4: ("It is so.", "A drink.")}
    lines = [{"step": step, "eval/kl": 1.0 / (1 + step), "eval/accuracy": step / 4} for step in (0, 2, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(CheckpointError):
        read(tmp_path, heldout, 1.0, 2.0)
    for step, responses in texts.items():
        rows = [
            {"prompt": f"<user>{prompt}<end>", "text": text, "response_ids": list(range(len(text)))}
            for prompt, text in zip(("Why?", "What is tea?"), responses, strict=True)
        ]
        (tmp_path / "samples" / f"step_{step:08d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read(tmp_path, heldout, 90.0, 8.25)
    assert found["kl"] == [1.0, 0.2] and found["one_sentence"] == [0.0, 1.0] and found["mean_tokens"] == [9.0, 8.5]
    assert found["responses"][1] == {"prompt": "What is tea?", "before": "Tea", "after": "A drink."}
    text = as_text(found)
    assert all(part in text for part in ("What is tea?", "It is so.", "100%", "1.5 minutes", "8.2 GiB"))
