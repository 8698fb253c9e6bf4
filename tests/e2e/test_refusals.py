"""Test that preflight refuses invalid input and writes nothing.

The rules themselves are in tests/unit: model folders, data, tokens, and what is refused before heavy imports.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gkd.config.load import load_config
from gkd.errors import ConfigError, TeacherUnavailable
from gkd.preflight.run import preflight
from tests.dist.helpers import free_port
from tests.e2e.conftest import EOS, Lab, resized
from tests.service.harness import ServerProcess

pytestmark = pytest.mark.e2e


def planned(lab: Lab, port: int, *overrides: str) -> Any:
    """Return what preflight plans, or raise its error."""
    command = lab.command(lab.root / "refused", port, *overrides)
    return preflight(load_config(None, command[command.index("--config") + 2 :]))


def refused(lab: Lab, port: int, *overrides: str) -> ConfigError:
    """Return the error of preflight, and assert that it wrote nothing."""
    with pytest.raises(ConfigError) as caught:
        planned(lab, port, *overrides)
    assert not (lab.root / "refused").exists(), "a refused run must write nothing"
    return caught.value


@pytest.mark.parametrize(
    ("key", "words", "settings"),
    [
        # A layout that cannot split the model would fail after all processes have started.
        ("actor.tp", " 4 ", ("trainer.n_gpus_per_node=3", "actor.tp=3")),
        ("actor.pp", " 2 ", ("trainer.n_gpus_per_node=3", "actor.pp=3")),
        ("rollout.tp", "", ("rollout.n_gpus_per_node=3", "rollout.tp=3")),
        # Positions beyond the model's range would be trained on, or crash an engine.
        ("data.max_response_length", "64", ("data.max_response_length=60",)),
        ("data.train_files", "", ("data.train_files=[absent.jsonl]",)),
        ("data.max_prompt_length", "", ("data.max_prompt_length=2",)),
        ("data.answer_key", "", ("data.answer_key=solution",)),
        ("teacher.topk", "32003", ("teacher.topk=40000",)),
    ],
)
def test_wrong_settings(lab: Lab, teacher_port: int, key: str, words: str, settings: tuple[str, ...]) -> None:
    """If it fails, a setting that does not fit model, data or teacher is found after the pools have started."""
    error = refused(lab, teacher_port, *settings)
    assert error.key == key and words in str(error)


def reshaped(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | (changes or {"intermediate_size": 128})))


def of_another_architecture(folder: Path) -> None:
    reshaped(folder, model_type="gpt2")


def with_other_words(folder: Path) -> None:
    text = json.loads((folder / "tokenizer.json").read_text())
    vocab = text["model"]["vocab"]
    vocab["w2"], vocab["w3"] = vocab["w3"], vocab["w2"]
    (folder / "tokenizer.json").write_text(json.dumps(text))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shutil.rmtree, "changed"),
        (reshaped, "gate_proj"),
        (of_another_architecture, "transformer.h"),
        (with_other_words, "teacher"),
    ],
)
def test_a_wrong_student(
    lab: Lab, teacher_port: int, tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    """If it fails, a missing or damaged model, or one whose ids are other tokens than the teacher's, is found minutes
    later or not at all.
    """
    folder = shutil.copytree(lab.student, tmp_path / "changed")
    change(folder)
    error = refused(lab, teacher_port, f"model.path={folder}")
    assert error.key == "model.path" and words in str(error)


def test_a_missing_teacher_server(lab: Lab) -> None:
    """If it fails, a missing server causes a hang instead of an error with an address and a command."""
    port = free_port()
    with pytest.raises(TeacherUnavailable) as caught:
        planned(lab, port, "teacher.outage_budget_s=3")
    assert f"127.0.0.1:{port}" in str(caught.value) and "--model PATH" in str(caught.value)
    assert not (lab.root / "refused").exists()


def test_an_embedding_without_rows_for_its_tokens(lab: Lab, teacher_port: int) -> None:
    """If it fails, a token of the prompts stops the run at a random step."""
    error = refused(lab, teacher_port, f"model.path={resized(lab.student, 31000)}")
    assert error.key == "model.path" and "32002" in str(error)


def test_a_padded_teacher_vocabulary_is_truncated_to_the_shared_ids(lab: Lab) -> None:
    """If it fails, models of one tokenizer with different embedding padding (Qwen2.5 1.5B and 7B) cannot be paired."""
    with ServerProcess(resized(lab.teacher, 32064), lab.root) as server:
        plan = planned(lab, server.port, f"trainer.run_dir={lab.root / 'padded_run'}")
        assert (plan.comparison.n_vocab, plan.teachers[0].vocab_size, plan.eos_ids) == (32003, 32064, [EOS])
