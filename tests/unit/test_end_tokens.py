"""Find the end-of-sequence tokens of a model folder."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gkd.config.load import load_config
from gkd.errors import ModelError
from gkd.hf.model_folder import eos_token_ids
from gkd.preflight.run import read_student
from tests.dist.megatron_reference import VOCAB, make_hf_folder
from tests.random_models import word_tokenizer
from tests.refusals import refuses

_tokenizer = partial(word_tokenizer, 20, unk_token="w0")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, [12]),
        ({"eos_token_id": [5, 12]}, {"eos_token_id": 7}, [5, 12]),
        ({"eos_token_id": 5}, {}, [5, 12]),
        (None, {"eos_token_id": [3, 4]}, [3, 4, 12]),
        ({"temperature": 0.7}, {"eos_token_id": 3}, [3, 12]),
        (None, {"text_config": {"eos_token_id": 9}}, [9, 12]),
        (None, {"eos_token_id": 3, "text_config": {"eos_token_id": 9}}, [3, 12]),
        (None, {"eos_token_id": None}, [12]),
        (None, {"eos_token_id": 0}, [0, 12]),
    ],
)
def test_end_tokens_are_those_of_transformers(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any] | None, expected: list[int]
) -> None:
    """Fails if responses of a model go on behind the end of its turn, which transformers and vLLM stop at."""
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(str(tmp_path), _tokenizer(eos_token="w12")) == expected


def test_no_end_token_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    """Fails if every response of a run has the maximum length, or an error does not name the file."""
    with pytest.raises(ModelError):
        eos_token_ids(str(tmp_path), _tokenizer())
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ModelError):
        eos_token_ids(str(tmp_path), _tokenizer(eos_token="w12"))


@pytest.mark.parametrize("value", ["</s>", "2", 2.0, True, [2, "</s>"], [[2]]])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_end_tokens_that_are_no_numbers_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    """Fails if a token's text in the place of its id is a traceback, or true counts as token 1."""
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError):
        eos_token_ids(str(tmp_path), _tokenizer(eos_token="w12"))


def test_end_tokens_outside_of_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """Fails if a run starts all its processes before the engines refuse an end token of a wrong file or setting."""
    folder = make_hf_folder(tmp_path / "model", "qwen3")
    _tokenizer(eos_token="w12").save_pretrained(folder)
    lengths = ["data.max_prompt_length=16", "data.max_response_length=16"]
    settings = [f"model.path={folder}", "trainer.device=cpu", *lengths]
    assert read_student(load_config(None, [*settings, "rollout.stop_token_ids=[5]"]))[2] == [5, 12]
    with refuses("rollout.stop_token_ids"):
        read_student(load_config(None, [*settings, f"rollout.stop_token_ids=[5,{VOCAB}]"]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, VOCAB]}))
    with refuses("model.path"):
        read_student(load_config(None, settings))
