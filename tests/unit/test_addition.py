"""Test the quickstart's task: correct worked solutions, disjoint splits, a lossless tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from examples.quickstart.addition import (
    EOS_TOKEN,
    HIGHEST,
    LOWEST,
    PAD_TOKEN,
    Problem,
    build_tokenizer,
    extract_answer,
    make_problems,
    read_jsonl,
    write_jsonl,
)

OPERANDS = st.integers(LOWEST, HIGHEST)


@given(OPERANDS, OPERANDS)
def test_a_worked_solution_is_spelled_out_and_true(left: int, right: int) -> None:
    """If this fails, the teacher is trained on wrong carries or on a wrong answer, or the format changed: models made
    earlier and the documentation no longer show it.
    """
    problem = Problem(left, right)
    columns, answer = problem.response.split(";")
    assert columns.count(",") == 2
    carry = 0
    for place, column in enumerate(columns.split(",")):
        terms = [left // 10**place % 10, right // 10**place % 10] + [1] * carry
        assert column == f"{'+'.join(map(str, terms))}={sum(terms):02d}"
        carry = sum(terms) // 10
    assert answer == str(left + right) == problem.answer == extract_answer(problem.response)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8+7=15",  # no answer
        "825",  # no worked solution
        "8+7=15;",
        "8+7=15;82",
        "8+7=15;08255",
        "8+7=15;825,",  # goes on after the answer
        "8+7=15;825;825",
        "8+7=15; 825",
        "8+7=15;٨٢٥",  # digits to str.isdigit, but not what the task writes
    ],
)
def test_a_malformed_response_has_no_answer(text: str) -> None:
    """If this fails, a malformed or incomplete response counts as an answer."""
    assert extract_answer(text) is None


def test_splits_are_disjoint_up_to_swapped_operands() -> None:
    """If this fails, held-out accuracy measures memory: the student saw the problem or its mirror image."""
    train, heldout = make_problems(seed=3, n_train=5000, n_heldout=500)
    assert (len(train), len(heldout)) == (5000, 500)
    assert len({frozenset((problem.left, problem.right)) for problem in train + heldout}) == 5500


def test_splits_depend_on_the_seed_and_nothing_else() -> None:
    """If this fails, two processes of one quickstart disagree on which problems are held out."""
    first = make_problems(seed=0, n_train=300, n_heldout=50)
    assert first == make_problems(seed=0, n_train=300, n_heldout=50)
    assert first[0] != make_problems(seed=1, n_train=300, n_heldout=50)[0]
    # Drawn first: a longer train split must not move a problem that was held out into training.
    assert first[1] == make_problems(seed=0, n_train=600, n_heldout=50)[1]


def test_prompt_file_holds_prompt_and_answer_only(tmp_path: Path) -> None:
    """If this fails, `gkd.data.prompts` cannot read the file, or distillation sees the worked solution."""
    problems, _ = make_problems(seed=0, n_train=20, n_heldout=1)
    write_jsonl(problems, tmp_path / "train.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows == [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems]
    assert read_jsonl(tmp_path / "train.jsonl") == problems


@given(st.text(max_size=50).filter(lambda text: EOS_TOKEN not in text and PAD_TOKEN not in text))
def test_tokenizer_round_trips_any_text(text: str) -> None:
    """If this fails, some text is lost or changed on its way to the model and back. A special token is one token."""
    tokenizer = build_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_saved_tokenizer_is_the_same_one(tmp_path: Path) -> None:
    """If this fails, engines that load the folder with AutoTokenizer see other ids than the models were trained on."""
    built = build_tokenizer()
    built.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == len(built) == 258
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    assert loaded.padding_side == "left"
    assert loaded.chat_template is None
    prompt, response = Problem(358, 467).prompt, Problem(358, 467).response
    for add_special_tokens in (True, False):
        ids = loaded(prompt, add_special_tokens=add_special_tokens)["input_ids"]
        assert ids == built(prompt)["input_ids"] and len(ids) == len(prompt)
    # Prompt and response are tokenized apart in training and together nowhere: the seam must not merge.
    assert loaded(prompt + response)["input_ids"] == loaded(prompt)["input_ids"] + loaded(response)["input_ids"]
